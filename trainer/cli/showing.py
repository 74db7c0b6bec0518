"""What a person sees of a training: its recipe at the start, a line while a step goes by.

Used by the `train` verb.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import orjson

from dflash_workers.contract.terminal import err

if TYPE_CHECKING:
    from trainer.online.recipe import TrainRecipe
    from trainer.online.watching import StepRecord


def print_recipe(recipe: TrainRecipe) -> None:
    """All choices, as they came to be."""
    body = orjson.dumps(dataclasses.asdict(recipe), option=orjson.OPT_INDENT_2)
    err.print(f"recipe {body.decode()}", markup=False, soft_wrap=True)


def step_line(record: StepRecord) -> str:
    """What of a step is worth a look while it goes by."""
    total_s = sum(record.seconds.values()) or 1.0
    shares = " ".join(f"{name} {s / total_s:.0%}" for name, s in record.seconds.items() if s)
    mfu = "" if record.mfu is None else f" MFU {record.mfu:.0%}"
    starving = f" ({record.starving} starves)" if record.starving else ""
    return (
        f"loss {record.loss:.2f} accept {record.accept_length:.2f} "
        f"{record.tokens_per_s:,.0f} tok/s{mfu} {shares}{starving}"
    )
