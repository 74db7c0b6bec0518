#!/usr/bin/env bash
# Online training on one GPU, in one call of at most 200 s; results in $OUT, whatever came of it.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-out}
PYTHONUNBUFFERED=1 timeout -s INT 195 python3 -m benchmarks.online --out "$out" --budget-s 175 \
    2>&1 | tee "$out/online.log"
