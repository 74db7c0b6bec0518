#!/bin/bash
# A trained drafter in a real server against PyTorch, on one GPU:
#
#   served.sh plain|train|drafted|compare|all MODEL WORK OUT
#
# plain    a server without a drafter: replies to compare with, answers to train on   about 160 s
# train    trains on those answers, exports, decodes in PyTorch                       about 200 s
# drafted  a server with that export: its replies                                     about 150 s
# compare  figures and the results' files, into OUT                                   about 20 s
#
# The times are guesses made before the first run, none of them measured. What a stage made lies in
# WORK; a stage whose result is there does nothing, so that all of them can be called again and
# again, also with a WORK that was brought from elsewhere. Logs go to OUT. ENGINE_PYTHONPATH: where
# SGLang is, if not where the trainer's packages are; SERVE: another program than serve.sh beside
# this file; ENGINE_FLAGS, PROMPTS_FLAGS, ANSWER_FLAGS, TRAIN_FLAGS: more flags of the servers and
# of the three programs, such as TRAIN_FLAGS="--set num_steps=500".
set -euo pipefail
mkdir -p "$3" "$4"
stage=$1 model=$(realpath "$2") work=$(realpath "$3") out=$(realpath "$4")
here=$(cd "$(dirname "$0")" && pwd) python=${PYTHON:-python3}
cd "$here/../.."
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} PYTHONUNBUFFERED=1

serve() { # NAME PORT FLAGS...: returns once it answers
    local name=$1 port=$2
    shift 2
    # shellcheck disable=SC2086
    PYTHONPATH=${ENGINE_PYTHONPATH-${PYTHONPATH-}} setsid bash "${SERVE:-$here/serve.sh}" \
        "$model" "$port" ${ENGINE_FLAGS-} "$@" >"$out/$name.log" 2>&1 </dev/null &
    server=$!
    trap 'kill -TERM -- "-$server" 2>/dev/null || true' EXIT
    for _ in $(seq 300); do
        [ "$(curl -s -m 2 -o /dev/null -w '%{http_code}' "127.0.0.1:$port/health")" = 200 ] && return
        kill -0 "$server" 2>/dev/null || break
        sleep 1
    done
    tail -40 "$out/$name.log"
    return 1
}

quit() { # the server that `serve` started
    kill -TERM -- "-$server" 2>/dev/null || true
    for _ in $(seq 30); do
        kill -0 -- "-$server" 2>/dev/null || break
        sleep 1
    done
    kill -KILL -- "-$server" 2>/dev/null || true
    trap - EXIT
}

served() { "$python" -m benchmarks.served "$@"; }

short_training() { "$python" -m benchmarks.short_training "$@"; }

plain() {
    # shellcheck disable=SC2086
    [ -f "$work/asked.json" ] || served prompts --model "$model" --out "$work/asked.json" \
        ${PROMPTS_FLAGS-}
    [ -f "$work/plain.json" ] && [ -f "$work/answers.json" ] && return
    serve plain 31000
    served ask --url http://127.0.0.1:31000 --prompts "$work/asked.json" --out "$work/plain.json"
    # shellcheck disable=SC2086
    short_training answer --url http://127.0.0.1:31000 --model "$model" \
        --out "$work/answers.json" ${ANSWER_FLAGS-}
    quit
}

train() {
    if [ ! -d "$work/export" ]; then
        # shellcheck disable=SC2086
        short_training train --model "$model" --answers "$work/answers.json" --out "$work" \
            ${TRAIN_FLAGS-}
    fi
    [ -f "$work/ours.json" ] || served evaluate --model "$model" --drafter "$work/export" \
        --prompts "$work/asked.json" --out "$work/ours.json"
}

drafted() {
    [ -f "$work/drafted.json" ] && return
    serve drafted 31001 --max-running-requests 64 --cuda-graph-max-bs 64 \
        --speculative-algorithm DFLASH --speculative-draft-model-path "$work/export" \
        --speculative-draft-attention-backend triton
    served ask --url http://127.0.0.1:31001 --prompts "$work/asked.json" --out "$work/drafted.json"
    quit
}

compare() {
    served compare --model "$model" --prompts "$work/asked.json" --out "$out" \
        "$work/plain.json" "$work/drafted.json" "$work/ours.json"
}

case $stage in
plain | train | drafted | compare) "$stage" ;;
all)
    for each in plain train drafted compare; do
        echo "== $each, $SECONDS s"
        "$each"
    done
    ;;
*)
    echo "no stage $stage" >&2
    exit 2
    ;;
esac
echo "done: $stage, $SECONDS s"
