#!/bin/bash
# `dflash-fleet bench` on a live engine, over a run that it plans for that:
# bench.sh MODEL PORT OUT [flags of bench]. About 130 s with --window-s 6 --settle-s 3.
mkdir -p "$3"
exec "${PYTHON:-python3}" -m benchmarks.knee --engine-url "http://127.0.0.1:$2" --model "$1" \
    --out "$3" "${@:4}"
