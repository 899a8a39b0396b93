# shellcheck shell=bash
# The environment of the batch scripts, which source it from the project's folder: edit it for your cluster.

# module load cuda
# export https_proxy=http://proxy:3128            # for downloads
PYTHON=${PROBEMB_PYTHON:-.venv/bin/python}        # must be on a file system that all nodes see
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}      # for data workers; trainers set their own with --engine.threads
trap '' USR1                                      # until slurm.rank listens
ulimit -c 0                                       # no core files of many GB from a crashed rank

# NCCL needs no settings on most clusters; uncomment where it does (see docs/pretrain.md).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}             # INFO shows which network it uses
# export NCCL_SOCKET_IFNAME=ib0                   # network interface between the nodes
# export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME   # the same for the CPU's collectives
# export NCCL_IB_HCA=mlx5                         # InfiniBand adapters to use
# export NCCL_IB_DISABLE=1                        # no InfiniBand: use sockets
# export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # less fragmentation when memory is tight
