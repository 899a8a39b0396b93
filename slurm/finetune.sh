#!/usr/bin/env bash
# Finetuning on a Slurm cluster; everything after the script's name goes to `python -m finetune.run`:
#
#   sbatch slurm/finetune.sh --method pcmepp --data.path dataset_coco.json --data.images data/coco --out runs/coco
#   sbatch --array=1-9 slurm/finetune.sh --data.path dataset_coco.json --data.images data/coco --out runs/coco
#            # method i of METHODS in slurm/rank.py, or of PROBEMB_METHODS, each in its own folder: runs/coco/vse
#   sbatch --array=1-6 slurm/finetune.sh --sweep sweep.txt --data.path …   # line i of sweep.txt is added to run i
#
# Submit from the project's folder, and edit the lines below, as in pretrain.sh.
#SBATCH --job-name=finetune
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
##SBATCH --partition=gpu
#
# Keep these.
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

cd "${SLURM_SUBMIT_DIR:-.}" && . slurm/common.sh && exec "$PYTHON" -m slurm.rank finetune.run "$@"
