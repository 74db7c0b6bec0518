"""Recipes: a training run as a function that returns the whole tree of choices.

Read by the `train` verb and by demo.py, handed to online/train.py. Each class of choices stands
beside its only reader, with units and limits; here stand the values and why. `--set key=value`
changes one: `--set num_steps=100 --set optimizer.learning_rate=1e-3`; an unknown key is an error.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from dflash_workers.contract.errors import BadInput
from trainer.drafter.config import DrafterShape
from trainer.drafter.loss import LossRecipe
from trainer.online.batches import DataRecipe
from trainer.online.step import OptimizerRecipe
from trainer.online.train import TrainRecipe


def smollm2_cpu() -> TrainRecipe:
    """SmolLM2-135M on two CPU cores in a minute or two: shows that it learns, no product."""
    return TrainRecipe(
        drafter=DrafterShape(
            num_layers=1,  # a second one costs more steps than it gains in a minute
            block_size=4,  # nothing longer is accepted at this size
            copy_target_layers=True,  # free; no better than random beyond noise at this size
        ),
        data=DataRecipe(
            batch_size=4,  # the head over 49,152 ids is most of a step: few rows, many steps
            num_anchors=4,  # of some 50 answer tokens
            max_len=256,  # tokens; question and answer of a primary school problem
            keep_features_mb=1000,  # some 1,000 samples: their forward would be most of a step
        ),
        loss=LossRecipe(gamma=2.0),  # short blocks: the first place is nearly all of the gain
        optimizer=OptimizerRecipe(
            learning_rate=2e-3,  # small and short: three times the paper's
        ),
        num_steps=400,
    )


RECIPES: dict[str, Callable[[], TrainRecipe]] = {"smollm2_cpu": smollm2_cpu}


def named_recipe(name: str, changes: Sequence[str]) -> TrainRecipe:
    """A recipe with `key=value` changes. Raises BadInput on unknown names and ill-typed values."""
    if name not in RECIPES:
        raise BadInput(f"unknown recipe {name!r}: there are {', '.join(sorted(RECIPES))}")
    recipe = RECIPES[name]()
    for change in changes:
        key, sign, text = change.partition("=")
        if not sign:
            raise BadInput(f"--set {change}: expected key=value")
        recipe = _changed(recipe, key.strip().split("."), text.strip(), key)
    return recipe


def _changed(node: Any, path: list[str], text: str, key: str) -> Any:
    kinds = typing.get_type_hints(type(node))
    name, *rest = path
    if name not in kinds:
        raise BadInput(f"--set {key}: no {name!r} here: there are {', '.join(kinds)}")
    if rest and not dataclasses.is_dataclass(kinds[name]):
        raise BadInput(f"--set {key}: {name!r} has nothing below it")
    inner = (
        _changed(getattr(node, name), rest, text, key) if rest else _value(kinds[name], text, key)
    )
    return dataclasses.replace(node, **{name: inner})


def _value(kind: Any, text: str, key: str) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = text
    if kind is float and type(value) is int:
        return float(value)
    if kind == list[int] and isinstance(value, list) and all(type(v) is int for v in value):
        return value
    if type(value) is not kind:
        name = getattr(kind, "__name__", kind)
        raise BadInput(f"--set {key}={text}: expected {name}")
    return value
