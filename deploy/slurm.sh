#!/usr/bin/env bash
# One node per array task, each with one GPU; as many tasks as there are GPUs to be had.
#   sbatch --array=0-31 --export=ALL,FLEET=/local/dflash-fleet deploy/slurm.sh --run R --model M
# FLEET is where deploy/install-node.sh has put the two venvs; what follows the script's name goes to
# `dflash-fleet node start`. DFLASH_* comes from the shell that calls sbatch.
#SBATCH --job-name=dflash-node
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --output=dflash-node-%A_%a.log
# Two minutes before the time limit, to this script alone: its `exec` makes the node the one that
# hears it. An end without notice costs the tokens since the last note, and no prompt.
#SBATCH --signal=B:TERM@120
set -euo pipefail

# Tasks of one job may share a host: ports and folders of their own.
port=$((30000 + SLURM_ARRAY_TASK_ID % 30000))
state=${SLURM_TMPDIR:-/tmp}/dflash-node-$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID

exec "$FLEET/venv/bin/dflash-fleet" node start \
  --engine-python "$FLEET/engine/bin/python" --state "$state" --base-port "$port" "$@"
