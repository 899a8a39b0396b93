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
# Keep these. After a failed node the evaluation restarts from its first image.
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
. slurm/common.sh || {
  printf "error: %s is not the project's folder.\n       Submit from the folder that holds slurm/.\n" "$PWD" >&2; exit 2
}
require_job zeroshot.sh
require_gpu_per_task GPU
torch_sees 1 || exit 2
say "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $*"
exec srun --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$PYTHON" -m zeroshot.imagenet "$@"
