#!/bin/bash
# Training and generating on several GPUs of one host, each stage one call of less than 8 minutes:
#
#   paired.sh train GPUS OUT [MODEL ANSWERS]   targets and drafters on 2 or 4 GPUs
#   paired.sh fleet GPUS OUT MODEL             an engine and a worker on each, against one of each
#
# ANSWERS: of MODEL, by `benchmarks.short_training answer`; without them only random weights train.
# What `train` has found lies in OUT/parts and is not found again, also with an OUT that was brought
# from elsewhere. NVLink multicast stays off. The time that the engines of `fleet` need to start was
# a guess. PYTHON, ENGINE_PYTHONPATH, SERVE and ENGINE_FLAGS as in served.sh.
set -euo pipefail
stage=$1 gpus=$2
mkdir -p "$3"
out=$(realpath "$3") model=${4:+$(realpath "$4")} answers=${5:+$(realpath "$5")}
here=$(cd "$(dirname "$0")" && pwd) python=${PYTHON:-python3}
cd "$here/../.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} PYTHONUNBUFFERED=1

train() {
    timeout -s INT 475 "$python" -m benchmarks.paired --gpus "$gpus" --out "$out" --budget-s 460 \
        ${answers:+--model "$model" --answers "$answers"} 2>&1 | tee -a "$out/paired.log"
}

quit() { # all engines that `fleet` started
    for engine in "${engines[@]}"; do kill -TERM -- "-$engine" 2>/dev/null || true; done
    sleep 5
    for engine in "${engines[@]}"; do kill -KILL -- "-$engine" 2>/dev/null || true; done
}

fleet() {
    engines=() urls=()
    trap quit EXIT
    for ((n = 0; n < gpus; n++)); do
        port=$((31000 + n))
        # shellcheck disable=SC2086
        CUDA_VISIBLE_DEVICES=$n PYTHONPATH=${ENGINE_PYTHONPATH-${PYTHONPATH-}} \
            setsid bash "${SERVE:-$here/serve.sh}" "$model" "$port" ${ENGINE_FLAGS-} \
            >"$out/engine-$n.log" 2>&1 </dev/null &
        engines+=("$!") urls+=(--engine-url "http://127.0.0.1:$port")
    done
    for ((n = 0; n < gpus; n++)); do await $((31000 + n)) "${engines[$n]}" "$out/engine-$n.log"; done
    timeout -s INT 240 "$python" -m benchmarks.fill_many --model "$model" --machine "h200x$gpus" \
        --out "$out" "${urls[@]}" 2>&1 | tee -a "$out/fleet.log"
}

await() { # PORT PROCESS LOG: until it answers
    for _ in $(seq 200); do
        [ "$(curl -s -m 2 -o /dev/null -w '%{http_code}' "127.0.0.1:$1/health")" = 200 ] && return
        kill -0 "$2" 2>/dev/null || break
        sleep 1
    done
    tail -40 "$3"
    return 1
}

case $stage in
train | fleet) "$stage" ;;
*)
    echo "no stage $stage" >&2
    exit 2
    ;;
esac
