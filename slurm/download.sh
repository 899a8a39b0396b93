#!/usr/bin/env bash
# Fetch a large corpus with a job array; everything after the script's name goes to `python -m tools.download`:
#
#   sbatch --array=1-16 slurm/download.sh cc12m cc12m.tsv --out data/cc12m
#   sbatch --dependency=afterany:JOB slurm/download.sh cc12m --out data/cc12m      # without an array: finishes
#
# Task i of n fetches every n-th shard. The second job fetches missing shards, drops duplicates, and writes the index and
# the report; with --retry-failed it retries failed images. Needs nodes that reach the internet and see --out. A task
# that meets its time limit is requeued and resumes; the shards in progress are fetched again.
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
# Keep these. The signal comes 60 s before the time limit, only to this script (B:).
#SBATCH --output=slurm-%x-%A-%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
. slurm/common.sh || {
  printf "error: %s is not the project's folder.\n       Submit from the folder that holds slurm/.\n" "$PWD" >&2; exit 2
}
require_job download.sh

arguments=("$@")
case " $*" in
  *" --processes"*) ;;
  *) arguments+=("--processes=${SLURM_CPUS_PER_TASK:-1}") ;;
esac
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  first=${SLURM_ARRAY_TASK_MIN:-1} last=${SLURM_ARRAY_TASK_MAX:-1} count=${SLURM_ARRAY_TASK_COUNT:-1}
  [ "$first" = 1 ] && [ "$last" = "$count" ] || refuse "The array counts from $first to $last in $count tasks." \
    "Give sbatch --array=1-N; finished shards are skipped."
  arguments+=("--part=$SLURM_ARRAY_TASK_ID/$count")
fi

stop_once() { kill -TERM "$1" 2>/dev/null; }
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST: ${arguments[*]}"
follow stop_once srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PYTHON" -m tools.download "${arguments[@]}"
# 2: the third start in a row that finished no shard. A cancelled job is not requeued.
[ -z "$asked" ] || [ -n "$ended" ] || [ "$code" = 0 ] || [ "$code" = 2 ] || requeue "with the missing shards"
exit "$code"
