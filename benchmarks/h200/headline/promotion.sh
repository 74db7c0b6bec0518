#!/bin/bash
# One real promotion: two nodes with an engine each on one GPU, a run that keeps both full, and
# `dflash-fleet promote`.
#
#   promotion.sh MODEL WORK OUT DRAFTER [flags of promote]
#
# WORK/prompts is prompt_sets.py's, WORK/services holds Redis and S3. The verdict with its evidence
# is OUT/promotion.json, the rate of the run before and after OUT/promotion_rates.json, what the
# nodes said OUT/node_*.log. In the environment: ENGINE_PYTHON (the Python that has SGLang; needed),
# ENGINE_FLAGS and NODE_FLAGS (more flags of both engines and nodes), IN_FLIGHT (requests in each,
# 48), WATCH_S (seconds of the windows of the rate, 30), SAMPLES (answers to a prompt, 8: the run
# must outlast the promotion).
set -euo pipefail
mkdir -p "$2" "$3"
model=$(realpath "$1") work=$(realpath "$2") out=$(realpath "$3") drafter=$(realpath "$4")
shift 4
cd "$(dirname "$0")/../../.."
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m benchmarks.h200.headline.promotion --model "$model" --work "$work" \
    --out "$out" --drafter "$drafter" --engine-python "$ENGINE_PYTHON" \
    "--engine-flags=${ENGINE_FLAGS-}" "--node-flags=${NODE_FLAGS-}" \
    --samples "${SAMPLES:-8}" --in-flight "${IN_FLIGHT:-48}" --watch-s "${WATCH_S:-30}" -- "$@"
