"""Batch scripts for Slurm, and submission through submitit."""
