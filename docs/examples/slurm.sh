#!/bin/bash
# Trains by a plan under Slurm, a task for each of its workers, and goes on where it was when the
# job is requeued:
#
#   sbatch docs/examples/slurm.sh plan.json runs/first --epochs 20
#
# The plan, the task's files and the run directory are on a file system that all nodes share.
# Nodes times tasks must be the plan's number of workers. --epochs and the like may be any options
# of tp-run; a run that goes on has them already.

#SBATCH --job-name=timeprest
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# For a plan that was profiled on GPUs, one for each task:
##SBATCH --gpus-per-task=1

set -euo pipefail

PLAN=${1:?give a plan}
RUN=${2:?give a run directory}
shift 2

# The workers meet on the first node; another port for each job, as nodes may have several.
NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${NODES%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# What tells the workers from whoever else reaches that port.
TIMEPREST_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export MASTER_ADDR MASTER_PORT TIMEPREST_SECRET

if [ -e "$RUN/plan.json" ]; then
    exec srun --kill-on-bad-exit=1 tp-run --resume --run-dir "$RUN"
fi
exec srun --kill-on-bad-exit=1 tp-run "$PLAN" --run-dir "$RUN" "$@"
