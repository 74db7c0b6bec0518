#!/bin/bash
# The fleet's path against a bare client on one engine: fill.sh MODEL PORT OUT IN_FLIGHT...
# About 290 s for each number of requests in flight. Prints the figures, writes results and log to OUT.
model=$1 port=$2 out=$3
shift 3
mkdir -p "$out"
for number in "$@"; do limits+=(--in-flight "$number"); done
exec "${PYTHON:-python3}" -m benchmarks.fill --engine-url "http://127.0.0.1:$port" \
    --model "$model" --machine h200 --out "$out" "${limits[@]}" 2> >(tee "$out/fill.log" >&2)
