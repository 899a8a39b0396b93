"""Batch scripts for Slurm (pretrain.sh, zeroshot.sh) and the same through submitit (submit.py)."""
