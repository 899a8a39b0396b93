#!/usr/bin/env bash
# Finetuning on a Slurm cluster; everything after the script's name goes to `python -m finetune.run`:
#
#   sbatch slurm/finetune.sh --method pcmepp --data.path dataset_coco.json --data.images data/coco --out runs/coco
#   sbatch --nodes=1 --gpus-per-node=4 --ntasks-per-node=4 --time=12:00:00 slurm/finetune.sh --method vse …
#   sbatch --array=1-9 slurm/finetune.sh --data.path dataset_coco.json --data.images data/coco --out runs/coco
#                                               # method i of METHODS below, each in its own folder: runs/coco/vse
#   sbatch --array=1-6 slurm/finetune.sh --sweep sweep.txt --data.path …   # line i of sweep.txt is added to run i
#
# Submit from the project's folder. The job saves and requeues itself before its time limit, and resumes in the same run
# folder until the run is finished. More in docs/pretrain.md.
#
# ---------------------------------------------------------------------------------------------- edit: what to ask for
# sbatch's command line takes precedence over these lines. One task for each GPU: the two numbers must agree.
#SBATCH --job-name=finetune
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
##SBATCH --partition=gpu
##SBATCH --account=my-project
##SBATCH --exclusive
#
# Keep these: %j stays the same when a job is requeued, so its log stays in one file. The signal comes 300 s before the
# time limit, only to this script (B:), which passes it on; raise it if a step and a checkpoint take longer.
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
METHODS=${PROBEMB_METHODS:-pcmepp pcmepp-mu infonce vse pcme daa p2rm ncr decl}  # of an array: --array=1-9
. slurm/common.sh || {
  printf "error: %s is not the project's folder.\n       Submit from the folder that holds slurm/.\n" "$PWD" >&2; exit 2
}
require_job finetune.sh
require_gpu_per_task
warn_without_time_to_save
take_arguments "$@"

if [ -z "$sweep" ] && [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then  # an array without a sweep: one method per task
  method='' out=''
  for ((i = 0; i < ${#arguments[@]}; i++)); do
    case ${arguments[i]} in
      --out) out=${arguments[i + 1]:-} ;;
      --out=*) out=${arguments[i]#*=} ;;
      --method | --method=*) method=1 ;;
    esac
  done
  read -ra methods <<<"$METHODS"
  [ -z "$method" ] || refuse "Each task of a job array takes its method from METHODS, and --method names one." \
    "Leave --method out, or --array; or give the tasks lines of arguments with --sweep FILE."
  [ -n "$out" ] || refuse "A job array over methods needs --out." "Each method gets its own folder in it."
  [[ $SLURM_ARRAY_TASK_ID -ge 1 && $SLURM_ARRAY_TASK_ID -le ${#methods[@]} ]] || refuse \
    "There is no method $SLURM_ARRAY_TASK_ID in METHODS." "Give sbatch --array=1-${#methods[@]} or a part of it."
  method=${methods[SLURM_ARRAY_TASK_ID - 1]}
  arguments+=(--method "$method" --out "$out/$method")
fi
run_ranks finetune.run
