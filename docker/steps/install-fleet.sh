#!/bin/sh
# A venv with this project, pinned by the lock, from the checkout that this script lies in.
#   docker/steps/install-fleet.sh FOLDER [EXTRAS]       EXTRAS as in pyproject.toml: monitor,train
# Without `train` no torch is installed; TORCH_INDEX_URL names an index with another build of it.
# Safe to call again: what is there is brought up to date.
set -eu
checkout=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?usage: install-fleet.sh FOLDER [EXTRAS]}
extras=${2:-}

python3 -m venv "$folder"
"$folder/bin/pip" install --quiet --constraint "$checkout/requirements.lock" \
    ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$checkout${extras:+[$extras]}"
