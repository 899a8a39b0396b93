#!/usr/bin/env bash
# Finetuning on a Slurm cluster; everything after the script's name goes to `python -m finetune.run`:
#
#   sbatch slurm/finetune.sh --method pcmepp --data.path dataset_coco.json --data.images data/coco --out runs/coco
#   sbatch --nodes=1 --gpus-per-node=4 --ntasks-per-node=4 --time=12:00:00 slurm/finetune.sh --method vse …
#   sbatch --array=1-9 slurm/finetune.sh --data.path dataset_coco.json --data.images data/coco --out runs/coco
#                                               # method i of METHODS below, each in a folder of its own: runs/coco/vse
#   sbatch --array=1-6 slurm/finetune.sh --sweep sweep.txt --data.path …   # line i of sweep.txt is added to run i
#
# Submit from the project's folder. The job saves and requeues itself before its time limit, and goes on in the same
# run folder until the run is finished. docs/slurm.md says what else happens.
#
# ---------------------------------------------------------------------------------------------- edit: what to ask for
# Options of sbatch's command line win over these lines. One task for each GPU: the two numbers must agree.
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
# Keep these: %j stays the same when a job is requeued, so its log goes on in one file. The signal comes 300 s before
# the time limit, to this script alone (B:), which passes it on; raise it if a step (or the validation after an epoch)
# and a checkpoint take longer.
#SBATCH --output=slurm-%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

set -uo pipefail

# --------------------------------------------------------------------------------------------- edit: the environment
# module load cuda
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
PYTHON=${PROBEMB_PYTHON:-.venv/bin/python}  # must be on a file system that all nodes see
METHODS=${PROBEMB_METHODS:-pcmepp pcmepp-mu infonce vse pcme daa p2rm ncr decl}  # of an array: --array=1-9

# NCCL finds its way on most clusters; uncomment where it does not (docs/slurm.md says how to tell).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}             # INFO shows which network it uses
# export NCCL_SOCKET_IFNAME=ib0                   # the interface that the nodes reach each other through
# export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME   # the same for the CPU's collectives
# export NCCL_IB_HCA=mlx5                         # InfiniBand adapters to use
# export NCCL_IB_DISABLE=1                        # no InfiniBand here: go through sockets
# export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # less fragmentation when memory is tight
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}      # for data workers; the trainer's own threads: see below
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
ulimit -c 0                                       # no core files of many GB from a crashed rank

# ------------------------------------------------------------------------------------------ nothing to edit from here
PREEMPTED=85  # how finetune.run exits when it was told to stop, and has saved

refuse() { printf 'error: %s\n       %s\n' "$1" "$2" >&2; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] || refuse "This is a batch script for Slurm." "Start it with: sbatch slurm/finetune.sh ARGUMENTS"
[ -f finetune/run.py ] || refuse "The job was submitted from $PWD, which is not the project's folder." \
  "Submit it from the folder that holds finetune/ and slurm/."
[ -x "$PYTHON" ] || PYTHON=$(command -v "$PYTHON") || refuse "There is no Python at ${PROBEMB_PYTHON:-.venv/bin/python}." \
  "Run make install in $PWD, or set PROBEMB_PYTHON to another interpreter."

# A run that trains on CPUs because somebody forgot the GPUs wastes a day before anyone notices.
gpus=${SLURM_GPUS_ON_NODE:-0}
if [ "${PROBEMB_ALLOW_CPU:-}" != 1 ]; then
  [ "$gpus" -gt 0 ] || refuse "The job has no GPUs." \
    "Add --gpus-per-node=N to sbatch, or PROBEMB_ALLOW_CPU=1 to the environment to train on CPUs."
  [ "$gpus" = "${SLURM_NTASKS_PER_NODE:-1}" ] || refuse \
    "The job has $gpus GPUs but ${SLURM_NTASKS_PER_NODE:-1} tasks on each node; every GPU needs one." \
    "Give sbatch --gpus-per-node and --ntasks-per-node with the same number."
elif [ "$gpus" = 0 ]; then
  export CUDA_VISIBLE_DEVICES=  # the node may have GPUs, but they are not this job's
fi

# The time limit, as D-HH:MM:SS, HH:MM:SS, MM:SS or UNLIMITED, in seconds.
seconds() {
  local days=0 clock=$1 parts
  case $clock in *-*) days=${clock%%-*} clock=${clock#*-} ;; esac
  IFS=: read -ra parts <<<"$clock"
  while [ ${#parts[@]} -lt 3 ]; do parts=(0 "${parts[@]}"); done
  echo $((10#$days * 86400 + 10#${parts[0]} * 3600 + 10#${parts[1]} * 60 + 10#${parts[2]}))
}
limit=$(squeue --noheader --job "$SLURM_JOB_ID" --format %l)
margin=$(sed -n 's/^#SBATCH --signal=B:USR1@\([0-9]*\).*/\1/p' "$0")
if [[ $limit =~ ^[0-9:-]+$ ]] && [ "$(seconds "$limit")" -le "${margin:-300}" ]; then
  refuse "The time limit $limit is not longer than the ${margin:-300} s kept for the last checkpoint." \
    "Give sbatch a longer --time."
fi

# --sweep FILE: this array task's line of it (blank lines and comments do not count) goes after the other arguments,
# where it wins over them.
arguments=(--resume) sweep= method= out=
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || arguments+=("--engine.threads=$SLURM_CPUS_PER_TASK")
while [ $# -gt 0 ]; do
  case $1 in
    --sweep) [ $# -gt 1 ] || refuse "--sweep names no file." "Write --sweep FILE."; sweep=$2; shift 2 ;;
    --sweep=*) sweep=${1#*=}; shift ;;
    *)
      case $1 in
        --out) out=${2:-} ;;
        --out=*) out=${1#*=} ;;
        --method | --method=*) method=1 ;;
      esac
      arguments+=("$1")
      shift
      ;;
  esac
done
if [ -n "$sweep" ]; then
  [ -f "$sweep" ] || refuse "The list of a sweep, $sweep, does not exist." "Write one line of arguments for each run."
  [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || refuse "--sweep works in job arrays only." "Add --array=1-N to sbatch."
  line=$(grep -Ev '^[[:space:]]*(#|$)' "$sweep" | sed -n "${SLURM_ARRAY_TASK_ID}p")
  [ -n "$line" ] || refuse "$sweep has no line $SLURM_ARRAY_TASK_ID." "Let --array count from 1 to its number of lines."
  mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$line")
  case " ${words[*]}" in
    *" --out"*) ;;
    *) refuse "Line $SLURM_ARRAY_TASK_ID of $sweep names no --out." "Give each run of a sweep a folder of its own." ;;
  esac
  arguments+=("${words[@]}")
elif [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then  # an array without a sweep: one method for each task
  read -ra methods <<<"$METHODS"
  [ -z "$method" ] || refuse "Each task of a job array takes its method from METHODS, and --method names one." \
    "Leave --method out, or --array; or give the tasks lines of arguments with --sweep FILE."
  [ -n "$out" ] || refuse "A job array over methods needs --out." "Each method gets a folder of its own in it."
  [[ $SLURM_ARRAY_TASK_ID -ge 1 && $SLURM_ARRAY_TASK_ID -le ${#methods[@]} ]] || refuse \
    "There is no method $SLURM_ARRAY_TASK_ID in METHODS." "Give sbatch --array=1-${#methods[@]} or a part of it."
  method=${methods[SLURM_ARRAY_TASK_ID - 1]}
  arguments+=(--method "$method" --out "$out/$method")
fi

# Where the ranks meet: the job's first node, never localhost; a port below the ones that systems hand out by
# themselves, another one for every job that may share the node.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) PYTHON PREEMPTED

# What every task does; srun is the launcher, and accelerate finds the other ranks by torch's variables. USR1 is ignored
# until Python has a handler for it, or it would kill a rank that is starting; the signal is repeated. A rank that fails
# ends the others with USR2, as they would wait for it; a rank that has saved does not, as others may still be writing:
# srun's own --kill-on-bad-exit cannot tell the two apart.
rank() {
  trap '' USR1
  trap : TERM
  trap 'exit 1' USR2
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
  local code=0
  if [ "${PROBEMB_ALLOW_CPU:-}" != 1 ] && [ "$LOCAL_RANK" = 0 ] &&
    ! "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))' "$LOCAL_WORLD_SIZE"; then
    echo "error: torch does not see the job's $LOCAL_WORLD_SIZE GPUs on $(hostname)." >&2
    echo "       Look at nvidia-smi and the torch build there, or avoid it with --exclude=$(hostname)." >&2
    code=2
  else
    "$PYTHON" -m finetune.run "$@" || code=$?
  fi
  if [ "$code" != 0 ] && [ "$code" != "$PREEMPTED" ]; then
    echo "rank $RANK on $(hostname) ended with code $code" >&2
    trap '' USR2
    scancel --signal=USR2 "$SLURM_JOB_ID.$SLURM_STEP_ID"
  fi
  exit "$code"
}

# USR1 (soon the time limit, or somebody wants the nodes) goes on to the ranks until they have ended. TERM (scancel, the
# time limit itself, a failed node) reaches them by itself, and this script must not bring back what scancel ends.
step='' told='' ended='' interrupted=''
tell() { told=1 interrupted=1; [ -z "$step" ] || (while kill -USR1 "$step" 2>/dev/null; do sleep 5; done) & }
trap tell USR1
trap 'ended=1 interrupted=1' TERM

echo "== $(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST:" \
  "$SLURM_NTASKS ranks, meeting at $MASTER_ADDR:$MASTER_PORT: ${arguments[*]}"
# In the background, as bash runs no trap while it waits for a command. All GPUs of a node are shown to all of its ranks:
# NCCL needs that to copy between them.
srun --export=ALL --ntasks-per-node="${SLURM_NTASKS_PER_NODE:-1}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  --gpu-bind=none --kill-on-bad-exit=0 --wait=600 --label \
  bash -c "$(declare -f rank); rank \"\$@\"" rank "${arguments[@]}" &
step=$!
[ -z "$told" ] || tell
code=1
while :; do
  interrupted=''
  wait "$step"
  status=$?
  [ "$status" = 127 ] || code=$status  # 127: the wait before had its status already
  [ -n "$interrupted" ] || break
done

late() { scontrol show job "$SLURM_JOB_ID" | grep -q Reason=TimeLimit; }  # saved, but only after the time limit
if [ -n "$ended" ] && ! { [ "$code" = "$PREEMPTED" ] && late; }; then
  echo "== $(date '+%F %T') ended by Slurm (scancel, time limit or a failed node)"
elif [ "$code" = "$PREEMPTED" ] || { [ -n "$told" ] && [ "$code" = 138 ]; }; then  # 138: USR1 came before a rank began
  echo "== $(date '+%F %T') told to stop: back into the queue"
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  echo "error: Slurm does not requeue the job." >&2
  echo "       Submit it again: it goes on from its newest checkpoint." >&2
fi
exit "$code"
