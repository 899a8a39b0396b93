#!/usr/bin/env bash
# Fetching a large corpus with a job array; everything after the script's name goes to `python -m tools.download`:
#
#   sbatch --array=1-16 slurm/download.sh cc12m cc12m.tsv --out data/cc12m
#   sbatch --dependency=afterany:JOB slurm/download.sh cc12m --out data/cc12m      # without an array: finishes
#
# Task i of n fetches every n-th shard. The second job fetches what the array left undone, drops duplicates, and writes
# the index and the report; with --retry-failed it asks once more. Needs nodes that reach the internet and see --out.
# A task that meets its time limit is requeued and goes on; the shards it was at are fetched anew.
#
# Submit from the project's folder.
#
# ---------------------------------------------------------------------------------------------- edit: what to ask for
#SBATCH --job-name=download
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
##SBATCH --partition=data
##SBATCH --account=my-project
#
# Keep these. The signal comes 60 s before the time limit, to this script alone (B:).
#SBATCH --output=slurm-%x-%A-%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

set -uo pipefail

# --------------------------------------------------------------------------------------------- edit: the environment
# export https_proxy=http://proxy:3128
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
PYTHON=${PROBEMB_PYTHON:-.venv/bin/python}  # must be on a file system that all nodes see
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

# ------------------------------------------------------------------------------------------ nothing to edit from here
refuse() { printf 'error: %s\n       %s\n' "$1" "$2" >&2; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || refuse "This is a batch script for Slurm." "Start it with: sbatch slurm/download.sh ARGUMENTS"
[ -f tools/download/command.py ] || refuse "The job was submitted from $PWD, which is not the project's folder." \
  "Submit it from the folder that holds tools/ and slurm/."
[ -x "$PYTHON" ] || PYTHON=$(command -v "$PYTHON") || refuse "There is no Python at ${PROBEMB_PYTHON:-.venv/bin/python}." \
  "Run make install in $PWD, or set PROBEMB_PYTHON to another interpreter."

arguments=("$@" "--processes=${SLURM_CPUS_PER_TASK:-1}")
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  first=${SLURM_ARRAY_TASK_MIN:-1} last=${SLURM_ARRAY_TASK_MAX:-1} count=${SLURM_ARRAY_TASK_COUNT:-1}
  [ "$first" = 1 ] && [ "$last" = "$count" ] || refuse "The array counts from $first to $last in $count tasks." \
    "Give sbatch --array=1-N; finished shards are passed over."
  arguments+=("--part=$SLURM_ARRAY_TASK_ID/$count")
fi

# USR1: the time limit is near. TERM (scancel, a failed node) reaches the task by itself, and nothing is to come back.
step='' told=''
tell() { told=1; [ -z "$step" ] || kill -TERM "$step" 2>/dev/null; }
trap tell USR1
trap : TERM

echo "== $(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST: ${arguments[*]}"
srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PYTHON" -m tools.download "${arguments[@]}" &
step=$!
[ -z "$told" ] || tell
code=1
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done
if [ -n "$told" ] && [ "$code" != 0 ]; then
  echo "== $(date '+%F %T') told to stop: back into the queue"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  echo "error: Slurm does not requeue the job." >&2
  echo "       Submit it again: it goes on with the shards that are missing." >&2
fi
exit "$code"
