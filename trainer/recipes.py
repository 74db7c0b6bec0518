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
from trainer.online.recipe import TrainRecipe
from trainer.online.step import OptimizerRecipe
from trainer.online.topology import TopologyRecipe


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


def smollm2_h200() -> TrainRecipe:
    """SmolLM2-135M on one GPU in minutes: the shortest way to a drafter that helps."""
    return TrainRecipe(
        drafter=DrafterShape(
            num_layers=5,  # the most that was tried, and the best
            block_size=8,  # the one that was tried: accept lengths of 2 leave room enough
            copy_target_layers=True,  # better than random by some 0.2 tokens a verify step
        ),
        data=DataRecipe(
            batch_size=8,  # rows: small matrices need many of them
            num_anchors=128,  # of a row, which holds several answers
            max_len=1024,  # tokens of a row: more than any answer of such a model is worth
            packed=True,  # one shape, so that everything is compiled once
        ),
        loss=LossRecipe(gamma=4.0),  # the paper's for blocks of 8
        optimizer=OptimizerRecipe(learning_rate=1e-3),  # the one that was tried with five layers
        num_steps=4000,
        save_every=500,  # steps: what a host that vanishes costs
        evaluate_every=500,  # steps: eight points of a curve
    )


def qwen3_8b_h200() -> TrainRecipe:
    """Qwen3-8B on one GPU; on 2, 4 or 8, each takes its share of a step's microbatches."""
    return TrainRecipe(
        drafter=DrafterShape(
            num_layers=5,  # the paper's
            block_size=16,  # the paper's for targets of this size
            mask_token_id=151_669,  # the published drafters'
        ),
        data=DataRecipe(
            batch_size=1,  # row: with its 512 blocks it fills the GPU
            num_anchors=512,  # of a row; the paper has as many of a sequence
            max_len=3072,  # tokens; the paper's
            packed=True,  # one shape, so that everything is compiled once
        ),
        loss=LossRecipe(gamma=7.0),  # the paper's for blocks of 16
        optimizer=OptimizerRecipe(learning_rate=6e-4),  # the paper's
        num_epochs=6,  # over a sealed plan; --steps N where the plan still grows
        num_microbatches=8,  # rows of a step: 24,576 tokens; a multiple of 1, 2, 4 and 8 GPUs
        save_every=1000,  # steps: what a host that vanishes costs
        evaluate_every=1000,  # steps
        num_evaluated=64,  # held-out answers, to rank checkpoints by
    )


def qwen36_27b_2x2() -> TrainRecipe:
    """Qwen3.6-27B on four GPUs: two hold the target and feed two that train the drafter."""
    return TrainRecipe(
        drafter=DrafterShape(
            num_layers=5,  # the published drafter's, like all here that has no other reason
            block_size=16,
            target_layer_ids=[1, 16, 31, 46, 61],  # of 64
            mask_token_id=248_070,
            sliding_window=2048,  # tokens; the published drafter's: long contexts stay cheap
        ),
        data=DataRecipe(
            batch_size=1,  # row
            num_anchors=512,  # of a row; the paper has as many of a sequence
            max_len=4096,  # tokens: answers that think are long, 1,800 of them on average
            packed=True,  # for the drafter; the target's recurrent layers take a document a row
        ),
        loss=LossRecipe(gamma=7.0),  # the paper's for blocks of 16
        optimizer=OptimizerRecipe(learning_rate=6e-4),  # the paper's
        topology=TopologyRecipe(
            num_targets=2,  # 54 GB of bf16 weights each, on a GPU of its own
        ),
        num_epochs=3,  # over a sealed plan; --steps N where the plan still grows
        num_microbatches=8,  # rows of a step, four a drafter: all transfers but one can hide
        save_every=500,  # steps: what a host that vanishes costs
        evaluate_every=1000,  # steps
        num_evaluated=64,  # held-out answers
    )


RECIPES: dict[str, Callable[[], TrainRecipe]] = {
    "smollm2_cpu": smollm2_cpu,
    "smollm2_h200": smollm2_h200,
    "qwen3_8b_h200": qwen3_8b_h200,
    "qwen36_27b_2x2": qwen36_27b_2x2,
}


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
