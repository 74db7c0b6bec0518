#!/bin/sh
# SGLang on its native PyTorch path, in a venv beside ours that shares our torch: for laptops.
#   docker/steps/install-cpu-engine.sh OURS ENGINE
set -eu
ours=${1:?usage: install-cpu-engine.sh OURS ENGINE}
engine=${2:?usage: install-cpu-engine.sh OURS ENGINE}
"$ours/bin/python" -m dflash_workers.engine_venv "$engine" --share-torch \
    ${TORCH_INDEX_URL:+--torch-index-url "$TORCH_INDEX_URL"}
