"""How fast the target decodes by itself and with a drafter, on this machine, in alternation.

Used by evaluate.py: the replies that it judges are the ones that are timed. Batches of prompts take
turns, and so does which of the two ways comes first, so that a machine which grows slower or faster
meanwhile does so for both. Invariant: both ways decode the same prompts, as many at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from trainer.drafter.choices import Sampling
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import (
    Limits,
    PlainReply,
    Prompts,
    SpeculativeReply,
    decode_plainly,
    decode_speculatively,
)
from trainer.drafter.target_rows import can_go_back
from trainer.online.target import FrozenTarget

WARM_UP_TOKENS = 2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Speed:
    """New tokens of all replies over the time that they took, prompts included."""

    plain_tokens_per_s: float
    tokens_per_s: float  # with the drafter
    speedup: float
    num_tokens: int
    prompts_at_once: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """Replies in the prompts' order."""

    plain: list[PlainReply]
    drafted: list[SpeculativeReply]
    # None: a target that computes each sequence anew at each step is no measure of speed.
    speed: Speed | None


def decode_both_ways(
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Prompts,
    limits: Limits,
    sampling: Sampling,
    prompts_at_once: int,
) -> Decoded:
    """Prompts of like length together. Raises BadInput: see drafter/target_rows.py."""
    device = target.head_VD.device
    plain: dict[int, PlainReply] = {}
    drafted: dict[int, SpeculativeReply] = {}
    plain_s = drafted_s = 0.0
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    _warm_up(target, drafter, prompts[order[0]], limits)
    for start in range(0, len(order), prompts_at_once):
        numbers = order[start : start + prompts_at_once]
        batch, chosen = [prompts[n] for n in numbers], replace(sampling, first_number=start)
        helped = partial(decode_speculatively, target, drafter, batch, limits, chosen)
        if is_helped_first := bool(start // prompts_at_once % 2):
            with_help, helped_s = _timed(helped, device)
        alone, alone_s = _timed(partial(decode_plainly, target, batch, limits, chosen), device)
        if not is_helped_first:
            with_help, helped_s = _timed(helped, device)
        plain |= zip(numbers, alone, strict=True)
        drafted |= zip(numbers, with_help, strict=True)
        plain_s, drafted_s = plain_s + alone_s, drafted_s + helped_s
    found = Decoded([plain[n] for n in sorted(plain)], [drafted[n] for n in sorted(drafted)], None)
    if not can_go_back(target):
        return found
    return replace(found, speed=_speed(found, plain_s, drafted_s, min(prompts_at_once, len(order))))


def _speed(found: Decoded, plain_s: float, drafted_s: float, prompts_at_once: int) -> Speed:
    num_plain = sum(len(reply.ids) for reply in found.plain)
    num_drafted = sum(len(reply.ids) for reply in found.drafted)
    plain_rate, rate = num_plain / plain_s, num_drafted / drafted_s
    return Speed(plain_rate, rate, rate / plain_rate, num_drafted, prompts_at_once)


def _warm_up(target: FrozenTarget, drafter: Drafter, prompt: Sequence[int], limits: Limits) -> None:
    """Whatever is made with the first call, by both ways."""
    few = replace(limits, max_new_tokens=WARM_UP_TOKENS)
    decode_plainly(target, [prompt], few)
    decode_speculatively(target, drafter, [prompt], few)


def _timed(work: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    began = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began
