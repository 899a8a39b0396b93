#!/usr/bin/env bash
# Pretraining on a Slurm cluster; everything after the script's name goes to `python -m pretrain.run`:
#
#   sbatch slurm/pretrain.sh --config pretrain/configs/vit_b16_cc3m_cc12m_redcaps.yaml --out runs/b16
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 --time=12:00:00 slurm/pretrain.sh --config …
#   sbatch --array=1-6 slurm/pretrain.sh --sweep sweep.txt --config …      # line i of sweep.txt is added to run i
#
# Submit from the project's folder. The job saves and requeues itself before its time limit, and resumes in the same run
# folder until it is finished (docs/pretrain.md). sbatch's command line takes precedence over the lines below, which are
# yours to edit: one task for each GPU, so the two numbers must agree.
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
##SBATCH --partition=gpu
#
# Keep these: %j stays the same when a job is requeued. The signal comes 300 s before the time limit, only to this script
# (B:), which passes it on; raise it if a step and a checkpoint take longer.
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

cd "${SLURM_SUBMIT_DIR:-.}" && . slurm/common.sh && exec "$PYTHON" -m slurm.rank pretrain.run "$@"
