#!/bin/bash
# From prompts to a faster server, on one GPU, stage by stage:
#
#   headline.sh MODEL WORK OUT generate             answers to WORK/prompts, shards, WORK/run.tar.zst
#   headline.sh MODEL WORK OUT train VARIANT...     drafters (training.py), PARALLEL at once
#   headline.sh MODEL WORK OUT serve VARIANT...     each in a server, beside one without a drafter
#   headline.sh MODEL WORK OUT pytorch VARIANT...   each decoded with in PyTorch
#   headline.sh MODEL WORK OUT findings VARIANT...  figures and curves, into OUT
#
# WORK/prompts is prompt_sets.py's. A stage whose result lies in WORK does nothing, and one that was
# cut off goes on, also where WORK was brought from elsewhere: WORK/run.tar.zst is all that `train`
# needs. Logs go to OUT. In the environment: ENGINE_PYTHONPATH (where SGLang is, if not where the
# trainer's packages are), SERVE (another program than ../serve.sh), ENGINE_FLAGS (of every server),
# GENERATE_FLAGS, TRAIN_FLAGS, PROMPTS_FLAGS (of the programs), TRAIN_S (seconds of `train`, after
# which drafters are exported as they are), MAX_TOKENS (KV slots of each of `serve`'s two servers).
set -euo pipefail
mkdir -p "$2/drafters" "$3"
model=$(realpath "$1") work=$(realpath "$2") out=$(realpath "$3") stage=$4
shift 4
here=$(cd "$(dirname "$0")" && pwd) python=${PYTHON:-python3}
cd "$here/../../.."
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} PYTHONUNBUFFERED=1
servers=()

leave() { # every server that `serve` started
    local server
    for server in "${servers[@]}"; do kill -TERM -- "-$server" 2>/dev/null || true; done
    for _ in $(seq 20); do
        kill -0 -- "${servers[@]/#/-}" 2>/dev/null || break
        sleep 1
    done
    for server in "${servers[@]}"; do kill -KILL -- "-$server" 2>/dev/null || true; done
    servers=()
}

serve() { # NAME PORT FLAGS...: in the background; `await` waits for it
    # shellcheck disable=SC2086
    PYTHONPATH=${ENGINE_PYTHONPATH-${PYTHONPATH-}} setsid bash "${SERVE:-$here/../serve.sh}" \
        "$model" "$2" ${ENGINE_FLAGS-} "${@:3}" >"$out/$1.log" 2>&1 </dev/null &
    servers+=($!)
    trap leave EXIT
}

is_up() { [ "$(curl -s -m 2 -o /dev/null -w '%{http_code}' "127.0.0.1:$1/health")" = 200 ]; }

await() { # NAME PORT
    local server
    for _ in $(seq 400); do
        is_up "$2" && return
        for server in "${servers[@]}"; do kill -0 "$server" 2>/dev/null || break 2; done
        sleep 1
    done
    tail -40 "$out/$1.log"
    return 1
}

run() { "$python" -m "benchmarks.h200.headline.$@"; }

generate() { # with the engine that is up on port 31000, or one of its own
    is_up 31000 || { serve generation 31000 && await generation 31000; }
    # shellcheck disable=SC2086
    run generate --model "$model" --prompts "$work/prompts" --work "$work" --out "$out" \
        --engine-url http://127.0.0.1:31000 ${GENERATE_FLAGS-}
    [ ${#servers[@]} = 0 ] || leave
}

train() { # VARIANT...
    local variant failed=0 left
    for variant in "$@"; do
        while [ "$(jobs -rp | wc -l)" -ge "${PARALLEL:-3}" ]; do wait -n || failed=1; done
        left=$((${TRAIN_S:-86400} - SECONDS))
        # shellcheck disable=SC2086
        timeout --preserve-status -s TERM "$((left > 1 ? left : 1))" "$python" \
            -m benchmarks.h200.headline.training --model "$model" --bundle "$work/run.tar.zst" \
            --out "$work/drafters" --variant "$variant" ${TRAIN_FLAGS-} \
            >"$out/train_$variant.log" 2>&1 &
    done
    while [ "$(jobs -rp | wc -l)" -gt 0 ]; do wait -n || failed=1; done
    for variant in "$@"; do echo "$variant: $(tail -1 "$out/train_$variant.log")"; done
    return "$failed"
}

asked() {
    # shellcheck disable=SC2086
    [ -f "$work/asked.json" ] || run measure prompts --model "$model" --prompts "$work/prompts" \
        --out "$work/asked.json" ${PROMPTS_FLAGS-}
}

measure() { # VARIANT...: each server pair in turn, on ports 31010 and up; one plain one for all
    local variant port=31010 flags=(
        --max-running-requests 64 --cuda-graph-max-bs 64 --max-total-tokens "${MAX_TOKENS:-262144}"
    )
    asked
    serve plain "$port" "${flags[@]}"
    for variant in "$@"; do
        port=$((port + 1))
        serve "drafted_$variant" "$port" "${flags[@]}" --speculative-algorithm DFLASH \
            --speculative-draft-model-path "$work/drafters/$variant/export" \
            --speculative-draft-attention-backend triton
    done
    await plain 31010
    port=31010
    for variant in "$@"; do
        port=$((port + 1))
        await "drafted_$variant" "$port"
        echo "== $variant, $SECONDS s"
        [ -f "$work/measured_$variant.json" ] || run measure serve --asked "$work/asked.json" \
            --plain http://127.0.0.1:31010 --drafted "http://127.0.0.1:$port" \
            --out "$work/measured_$variant.json"
    done
    leave
}

pytorch() { # VARIANT...
    asked
    for variant in "$@"; do
        [ -f "$work/pytorch_$variant.json" ] || run findings pytorch --model "$model" \
            --drafter "$work/drafters/$variant/export" --asked "$work/asked.json" \
            --out "$work/pytorch_$variant.json"
    done
}

findings() { # VARIANT...
    run findings curves --drafters "$work/drafters" --out "$out"
    for variant in "$@"; do
        run findings figures --model "$model" --asked "$work/asked.json" --variant "$variant" \
            --measured "$work/measured_$variant.json" --out "$out"
    done
}

case $stage in
generate | train | pytorch | findings) "$stage" "$@" ;;
serve) measure "$@" ;;
*)
    echo "no stage $stage" >&2
    exit 2
    ;;
esac
echo "done: $stage, $SECONDS s"
