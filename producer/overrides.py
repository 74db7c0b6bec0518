"""A row's own sampling values -> overrides of the run's, by name and type.

Called by schemas.py with a row's `sampling` object or with what an OpenAI batch body says. Whether
the values lie within the run's bounds is judged in limits.py, which knows the run.
"""

from __future__ import annotations

import math
from reprlib import repr as short

from dflash_workers.contract.errors import PromptRejected
from dflash_workers.contract.records import Json
from producer.json_values import parse_if_text

# What rows call the values -> what contract/records.py calls them (OVERRIDABLE).
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
_WHOLE = ("top_k", "max_new_tokens")


def read_overrides(value: object) -> Json:
    """The overrides that an object, or its JSON text, asks for; a null asks for nothing."""
    overrides: Json = {}
    for name, number in sorted(_object(value).items()):
        ours = NAMES.get(name)
        if ours is None:
            raise PromptRejected("bad_sampling", f"unknown sampling value {short(name)}")
        if number is None:
            continue
        typed = _typed(ours, number)
        if overrides.setdefault(ours, typed) != typed:
            raise PromptRejected("bad_sampling", f"two values for {ours}: {short(value)}")
    return overrides


def _object(value: object) -> Json:
    asked = parse_if_text(value, "bad_sampling")
    if asked is None:
        return {}
    if not isinstance(asked, dict):
        raise PromptRejected("bad_sampling", f"`sampling` must be an object: {short(value)}")
    return asked


def _typed(name: str, number: object) -> int | float:
    wanted = "a whole number" if name in _WHOLE else "a number"
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise PromptRejected("bad_sampling", f"{name} must be {wanted}: {short(number)}")
    if name not in _WHOLE:
        return float(number)
    if number != int(number):
        raise PromptRejected("bad_sampling", f"{name} must be {wanted}: {short(number)}")
    return int(number)
