"""Benchmarks of methods: losses, a training step of each, composition."""
