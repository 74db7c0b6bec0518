#!/usr/bin/env bash
# Two venvs for a node, ours without torch and the engine's own, from this checkout.
#   deploy/install-node.sh FOLDER [ENGINE]      ENGINE is what pip installs: sglang==0.5.17
# FOLDER belongs on a local disk: from a network file system every start takes minutes.
# Safe to call again: what is there is brought up to date.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:?usage: install-node.sh FOLDER [ENGINE]}
engine=${2:-sglang==0.5.17}

mkdir -p "$folder"
"$checkout/docker/steps/install-fleet.sh" "$folder/venv"

python3 -m venv "$folder/engine"
"$folder/engine/bin/pip" install --quiet "$engine"
