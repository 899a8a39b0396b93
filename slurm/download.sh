#!/usr/bin/env bash
# Fetch a large corpus with a job array; everything after the script's name goes to `python -m tools.download`:
#
#   sbatch --array=1-16 slurm/download.sh cc12m cc12m.tsv --out data/cc12m
#   sbatch --dependency=afterany:JOB slurm/download.sh cc12m --out data/cc12m      # without an array: finishes
#
# Task i of n fetches every n-th shard. The second job fetches missing shards, drops duplicates, and writes the index and
# the report; with --retry-failed it retries failed images. Needs nodes that reach the internet and see --out. A task
# that meets its time limit is requeued and resumes. Submit from the project's folder.
#SBATCH --job-name=download
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
##SBATCH --partition=data
#
# Keep these. The signal comes 60 s before the time limit, only to this script (B:).
#SBATCH --output=slurm-%x-%A-%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

cd "${SLURM_SUBMIT_DIR:-.}" && . slurm/common.sh && exec "$PYTHON" -m slurm.rank tools.download "$@"
