"""What a drafter was trained for: written by the trainer, checked by whoever serves one.

It stands in an export's provenance.json. Another target, precision, template or thinking mode costs
acceptance, and nothing else shows it: replies stay right, they only come slowly.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection

import orjson

from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.records import Json, RunSpec, encode

log = logging.getLogger(__name__)

PROVENANCE = "provenance.json"
MADE_WITH = "made_with"
TARGET = "target"  # what may be overridden


def may_differ(overrides: Collection[str]) -> bool:
    """Whether a person said `--override target`. Raises BadInput for any other name."""
    if unknown := set(overrides) - {TARGET}:
        raise BadInput(f"--override {unknown.pop()}: only {TARGET} can be overridden")
    return bool(overrides)


def made_with(spec: RunSpec) -> Json:
    """What the data of a run were made with, by content."""
    target = encode(spec.target)
    del target["name"]
    return {
        "target": target,
        "chat_template_sha256": hashlib.sha256(spec.chat_template.encode()).hexdigest(),
        "template_kwargs": spec.template_kwargs,
    }


def check_made_with(provenance: Json, spec: RunSpec, drafter: str) -> None:
    """Raises Conflict, naming what differs, where a drafter was trained for something else. One
    made elsewhere may not say: that is warned of."""
    found, wanted = provenance.get(MADE_WITH), made_with(spec)
    if not isinstance(found, dict):
        log.warning("%s does not say which target it was trained for (%s)", drafter, PROVENANCE)
        return
    differing = sorted({name for name, _ in _flat(found).items() ^ _flat(wanted).items()})
    if differing:
        raise Conflict(
            f"{drafter} was trained for another target than that of run {spec.run!r} "
            f"({', '.join(differing)}): its drafts would hardly be accepted; "
            "--override target serves it all the same"
        )


def _flat(facts: Json, prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = orjson.dumps(value).decode()
    return flat
