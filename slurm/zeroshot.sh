#!/usr/bin/env bash
# Zero-shot evaluation on one GPU; everything after the script's name goes to `python -m zeroshot.imagenet`:
#
#   sbatch slurm/zeroshot.sh --model runs/b16 --data data/imagenet/val --filter every
#   sbatch --dependency=afterok:JOB slurm/zeroshot.sh …                    # when the pretraining job JOB has finished
#
# Submit from the project's folder.
#
# ---------------------------------------------------------------------------------------------- edit: what to ask for
#SBATCH --job-name=zeroshot
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --time=02:00:00
##SBATCH --partition=gpu
##SBATCH --account=my-project
#
# Keep these. After a failed node the evaluation starts again, from its first image.
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

set -uo pipefail

# --------------------------------------------------------------------------------------------- edit: the environment
# module load cuda
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
PYTHON=${PROBEMB_PYTHON:-.venv/bin/python}  # must be on a file system that all nodes see
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export PYTHONUNBUFFERED=1

# ------------------------------------------------------------------------------------------ nothing to edit from here
refuse() { printf 'error: %s\n       %s\n' "$1" "$2" >&2; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || refuse "This is a batch script for Slurm." "Start it with: sbatch slurm/zeroshot.sh ARGUMENTS"
[ -f zeroshot/imagenet.py ] || refuse "The job was submitted from $PWD, which is not the project's folder." \
  "Submit it from the folder that holds zeroshot/ and slurm/."
[ -x "$PYTHON" ] || PYTHON=$(command -v "$PYTHON") || refuse "There is no Python at ${PROBEMB_PYTHON:-.venv/bin/python}." \
  "Run make install in $PWD, or set PROBEMB_PYTHON to another interpreter."
if [ "${PROBEMB_ALLOW_CPU:-}" != 1 ]; then
  [ "${SLURM_GPUS_ON_NODE:-0}" -gt 0 ] || refuse "The job has no GPU." \
    "Add --gpus-per-node=1 to sbatch, or PROBEMB_ALLOW_CPU=1 to the environment to evaluate on CPUs."
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    refuse "torch does not see the job's GPU on $(hostname)." "Look at nvidia-smi and the torch build there."
elif [ "${SLURM_GPUS_ON_NODE:-0}" = 0 ]; then
  export CUDA_VISIBLE_DEVICES=  # the node may have GPUs, but they are not this job's
fi

echo "== $(date '+%F %T') job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $*"
exec srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PYTHON" -m zeroshot.imagenet "$@"
