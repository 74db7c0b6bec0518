#!/bin/bash
# SGLang as the results on one H200 were measured: serve.sh MODEL PORT [more flags].
# Runs in SGLang's own environment, in the foreground. --enable-metrics: fill.py reads its counters.
exec "${PYTHON:-python3}" -m sglang.launch_server --model-path "$1" --host 127.0.0.1 --port "$2" \
    --attention-backend triton --sampling-backend pytorch --mem-fraction-static 0.5 \
    --max-running-requests 512 --cuda-graph-max-bs 256 --enable-metrics "${@:3}"
