# shellcheck shell=bash
# Common part of the batch scripts. They source it from the project's folder, where they were submitted: sbatch runs a
# copy of the script in a spool folder, so `$0` does not locate the project.

# --------------------------------------------------------------------------------------------- edit: the environment
# module load cuda
# export https_proxy=http://proxy:3128            # for downloads
PYTHON=${PROBEMB_PYTHON:-.venv/bin/python}        # must be on a file system that all nodes see

# NCCL needs no settings on most clusters; uncomment where it does (see docs/pretrain.md).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}             # INFO shows which network it uses
# export NCCL_SOCKET_IFNAME=ib0                   # network interface between the nodes
# export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME   # the same for the CPU's collectives
# export NCCL_IB_HCA=mlx5                         # InfiniBand adapters to use
# export NCCL_IB_DISABLE=1                        # no InfiniBand: use sockets
# export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True   # less fragmentation when memory is tight
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}      # for data workers; trainers set their own with --engine.threads
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
ulimit -c 0                                       # no core files of many GB from a crashed rank

# ------------------------------------------------------------------------------------------ nothing to edit from here
PREEMPTED=85  # exit code of a stage that was asked to stop and has saved
# What names this job alone: one task of every array has the array's number as its SLURM_JOB_ID.
THIS_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
THIS_JOB=${THIS_JOB:-${SLURM_JOB_ID:-}}

refuse() { printf 'error: %s\n       %s\n' "$1" "$2" >&2; exit 2; }
say() { echo "== $(date '+%F %T') $*"; }

# require_job SCRIPT: refuses to run outside a job of Slurm, or without a Python.
require_job() {
  [ -n "${SLURM_JOB_ID:-}" ] || refuse "This is a batch script for Slurm." "Start it with: sbatch slurm/$1 ARGUMENTS"
  [ -x "$PYTHON" ] || PYTHON=$(command -v "$PYTHON") || refuse \
    "There is no Python at ${PROBEMB_PYTHON:-.venv/bin/python}." \
    "Run make install in $PWD, or set PROBEMB_PYTHON to another interpreter."
}

# require_gpu_per_task [WHAT]: forgotten GPUs are refused, because a run on CPUs may go unnoticed for a day.
require_gpu_per_task() {
  local gpus=${SLURM_GPUS_ON_NODE:-0} tasks=${SLURM_NTASKS_PER_NODE:-1}
  if [ "${PROBEMB_ALLOW_CPU:-}" != 1 ]; then
    [ "$gpus" -gt 0 ] || refuse "The job has no ${1:-GPUs}." \
      "Add --gpus-per-node=$tasks to sbatch, or PROBEMB_ALLOW_CPU=1 to the environment to compute on CPUs."
    [ "$gpus" = "$tasks" ] || refuse "The job has $gpus GPUs but $tasks tasks on each node; every GPU needs one." \
      "Give sbatch --gpus-per-node and --ntasks-per-node with the same number."
  elif [ "$gpus" = 0 ]; then
    export CUDA_VISIBLE_DEVICES=  # GPUs of the node are not this job's
  fi
}

# torch_sees N: fails with a message unless torch sees N GPUs on this node.
torch_sees() {
  [ "${PROBEMB_ALLOW_CPU:-}" = 1 ] && return
  "$PYTHON" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < int(sys.argv[1]))' "$1" && return
  echo "error: torch does not see the job's $1 GPUs on $(hostname)." >&2
  echo "       Look at nvidia-smi and the torch build there, or avoid it with --exclude=$(hostname)." >&2
  return 2
}

# seconds TIME: D-HH:MM:SS, HH:MM:SS or MM:SS in seconds.
seconds() {
  local days=0 clock=$1 parts
  case $clock in *-*) days=${clock%%-*} clock=${clock#*-} ;; esac
  IFS=: read -ra parts <<<"$clock"
  while [ ${#parts[@]} -lt 3 ]; do parts=(0 "${parts[@]}"); done
  echo $((10#$days * 86400 + 10#${parts[0]} * 3600 + 10#${parts[1]} * 60 + 10#${parts[2]}))
}

# Warns of a time limit within the margin that the script's --signal line keeps for the last checkpoint. It does not
# refuse it, as sbatch's --signal wins over that line, and Slurm does not tell a job its margin.
warn_without_time_to_save() {
  local limit margin
  limit=$(squeue --noheader --job "$THIS_JOB" --format %l)
  margin=$(sed -n 's/^#SBATCH --signal=B:USR1@\([0-9]*\).*/\1/p' "$0")
  if [[ $limit =~ ^[0-9:-]+$ ]] && [ "$(seconds "$limit")" -le "${margin:-300}" ]; then
    echo "warning: the time limit $limit is not longer than the ${margin:-300} s kept for the last checkpoint, so the" \
      "run is asked to stop at once, unless sbatch got another --signal. Give sbatch a longer --time." >&2
  fi
}

# take_arguments WORD…: sets `arguments` of the stage, with --resume. `--sweep FILE` appends this array task's line of it
# (without blank lines and comments), which takes precedence; `sweep` is then set.
take_arguments() {
  local line words
  arguments=(--resume) sweep=
  [ -z "${SLURM_CPUS_PER_TASK:-}" ] || arguments+=("--engine.threads=$SLURM_CPUS_PER_TASK")
  while [ $# -gt 0 ]; do
    case $1 in
      --sweep) [ $# -gt 1 ] || refuse "--sweep names no file." "Write --sweep FILE."; sweep=$2; shift 2 ;;
      --sweep=*) sweep=${1#*=}; shift ;;
      *) arguments+=("$1"); shift ;;
    esac
  done
  [ -n "$sweep" ] || return 0
  [ -f "$sweep" ] || refuse "The list of a sweep, $sweep, does not exist." "Write one line of arguments for each run."
  [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || refuse "--sweep works in job arrays only." "Add --array=1-N to sbatch."
  line=$(tr -d '\r' <"$sweep" | grep -Ev '^[[:space:]]*(#|$)' | sed -n "${SLURM_ARRAY_TASK_ID}p")
  [ -n "$line" ] || refuse "$sweep has no line $SLURM_ARRAY_TASK_ID." "Let --array count from 1 to its number of lines."
  words=$(xargs -n 1 printf '%s\n' <<<"$line" 2>/dev/null && echo end) ||
    refuse "Line $SLURM_ARRAY_TASK_ID of $sweep has an open quote." "Close it, or write \\' for a quote itself."
  mapfile -t words <<<"${words%$'\n'end}"
  case " ${words[*]}" in
    *" --out"*) ;;
    *) refuse "Line $SLURM_ARRAY_TASK_ID of $sweep names no --out." "Give each run of a sweep a folder of its own." ;;
  esac
  arguments+=("${words[@]}")
}

# rank MODULE WORD…: one task. USR1 is ignored until Python has a handler, or it would kill a starting rank; the signal
# is repeated. A failed rank ends the others with USR2, as they would wait for it; a rank that has saved does not, as
# others may still be writing: srun's --kill-on-bad-exit cannot tell the two apart.
rank() {
  trap '' USR1
  trap : TERM
  trap 'exit 1' USR2
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
  local code=0
  if [ "$LOCAL_RANK" = 0 ]; then torch_sees "$LOCAL_WORLD_SIZE" || code=$?; fi
  [ "$code" != 0 ] || "$PYTHON" -m "$@" || code=$?
  [ "$code" != 140 ] || exit 1  # USR2 of a failed rank has reached Python before this shell
  if [ "$code" != 0 ] && [ "$code" != "$PREEMPTED" ]; then
    echo "rank $RANK on $(hostname) ended with code $code" >&2
    trap '' USR2
    scancel --signal=USR2 "$SLURM_JOB_ID.$SLURM_STEP_ID"
  fi
  exit "$code"
}

# follow NOTIFY COMMAND…: runs COMMAND in the background, because bash runs no trap while it waits for a command in the
# foreground; sets `code`. USR1 (time limit near, or preemption) sets `asked` and calls NOTIFY PID; TERM (scancel, time
# limit, failed node), which Slurm also sends to the tasks, sets `ended`.
step='' asked='' ended='' interrupted='' notify=''
ask_to_stop() { asked=1 interrupted=1; [ -z "$step" ] || "$notify" "$step"; }
follow() {
  notify=$1
  trap ask_to_stop USR1
  trap 'ended=1 interrupted=1' TERM
  "${@:2}" &
  step=$!
  [ -z "$asked" ] || ask_to_stop
  local status
  code=1
  while :; do
    interrupted=''
    wait "$step"
    status=$?
    [ "$status" = 127 ] || code=$status  # 127: the previous wait returned its status
    [ -n "$interrupted" ] || break
  done
}

# requeue WHERE: requeues the job and ends this script; WHERE says for people where it resumes.
requeue() {
  say "asked to stop: back into the queue"
  scontrol requeue "$THIS_JOB" && exit 0
  echo "error: Slurm does not requeue the job." >&2
  echo "       Submit it again: it resumes $1." >&2
}

# repeat_usr1 PID: a moment passes first, longer at every attempt of `run_ranks`, because USR1 kills what still starts.
repeat_usr1() { (sleep "$attempt"; while kill -USR1 "$1" 2>/dev/null; do sleep 5; done) & }
late() { scontrol show job "$THIS_JOB" | grep -q Reason=TimeLimit; }  # saved, but only after the time limit

# run_ranks MODULE: runs it with `arguments` on every rank; requeues a run that was asked to stop, and exits.
# The ranks meet at the job's first node, never localhost, at a port below the ephemeral range that differs between
# jobs. All ranks of a node see all of its GPUs, which NCCL needs to copy between them. A cancelled job is not requeued.
run_ranks() {
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) PYTHON PREEMPTED
  say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST:" \
    "$SLURM_NTASKS ranks, meeting at $MASTER_ADDR:$MASTER_PORT: ${arguments[*]}"
  local attempt
  for attempt in 1 2 3; do
    follow repeat_usr1 srun --export=ALL --ntasks-per-node="${SLURM_NTASKS_PER_NODE:-1}" \
      --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none --kill-on-bad-exit=0 --wait=600 --label \
      bash -c "$(declare -f torch_sees rank); rank \"\$@\"" rank "$1" "${arguments[@]}"
    # 138: USR1 came before the ranks could ignore it. They start again here, without a requeue, because only a run that
    # is told when it listens counts its starts without a step (probemb/runs/starts.py).
    if [ "$code" != 138 ] || [ -z "$asked" ] || [ -n "$ended" ]; then break; fi
    say "asked to stop before the ranks had started (attempt $attempt of 3)"
  done
  if [ -n "$ended" ] && ! { [ "$code" = "$PREEMPTED" ] && late; }; then
    say "ended by Slurm (scancel, time limit or a failed node)"
  elif [ "$code" = "$PREEMPTED" ]; then
    requeue "from its newest checkpoint"
  fi
  exit "$code"
}
