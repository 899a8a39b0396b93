#!/usr/bin/env bash
# Zero-shot evaluation on one GPU; everything after the script's name goes to `python -m zeroshot.imagenet`:
#
#   sbatch slurm/zeroshot.sh --model runs/b16 --data data/imagenet/val --filter every
#   sbatch --dependency=afterok:JOB slurm/zeroshot.sh …                    # when the pretraining job JOB has finished
#
# Submit from the project's folder. After a failed node the evaluation restarts from its first image.
#SBATCH --job-name=zeroshot
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --time=02:00:00
##SBATCH --partition=gpu
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
cd "${SLURM_SUBMIT_DIR:-.}" && . slurm/common.sh && exec "$PYTHON" -m slurm.rank zeroshot.imagenet "$@"
