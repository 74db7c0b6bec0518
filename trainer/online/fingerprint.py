"""Whether a model folder is the target that a run's answers came from.

Asked by train.py and trainer/heldout.py before anything is trained or measured: a drafter that
reads another model's states learns what the served one never says. The run's side stands in
run.json (producer/fingerprint.py); that each shard was made for the same target, naming.py checks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dflash_workers.contract.chat import tokenizer_sha256
from dflash_workers.contract.errors import Conflict, Missing
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.weights import weights_sha256


def check_target(spec: RunSpec, model_dir: str) -> None:
    """Raise Conflict, naming what differs, where a run's answers are another model's."""
    config = Path(model_dir) / "config.json"
    if not config.is_file():
        raise Missing(f"{model_dir or '(no folder)'}: no config.json: pass --model FOLDER")
    target = spec.target
    facts = {
        "config.json": (hashlib.sha256(config.read_bytes()).hexdigest(), target.config_sha256),
        "tokenizer": (tokenizer_sha256(model_dir), target.tokenizer_sha256),
        "weights, their precision or their quantisation": (
            weights_sha256(Path(model_dir)),
            target.weights_sha256,
        ),
    }
    for name, (ours, theirs) in facts.items():
        if ours != theirs:
            raise Conflict(
                f"{model_dir} is not the target of run {spec.run!r} ({target.name}): another "
                f"{name}: pass the folder that the run was made with"
            )
    if hashlib.sha256(spec.chat_template.encode()).hexdigest() != target.template_sha256:
        raise Conflict(
            f"run {spec.run!r}: its chat template is not the one that its fingerprint names"
        )
