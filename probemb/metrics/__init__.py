"""Metrics of retrieval, of uncertainty and of benchmarks, and bootstrap intervals."""
