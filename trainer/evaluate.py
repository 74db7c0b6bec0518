"""Does the drafter help: tokens per verify step on held-out prompts, against an untrained one.

Used by the `evaluate` verb and by demo.py, on an export of drafter/export.py. The trained drafter
decodes for real. At temperature 0 its replies must be the target's own, token by token; a
difference where the target's two best logits are less than TIE apart is a tie, any other is a
fault. At a higher one they are samples, which nothing can be compared with. The untrained drafter,
which training began with, is judged along the same replies: the same measure, and quick. Prompts
whose greedy reply ends in a loop are left out: they are easy to guess and nobody wants them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.flags import is_repetitive
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import (
    GreedyReply,
    Limits,
    Sampler,
    accepted_along,
    best_ids,
    decode_greedily,
    decode_speculatively,
)
from trainer.drafter.start import Start, untrained_drafter
from trainer.online.target import FrozenTarget, load_target

TIE = 1e-4  # logits
NUM_RESAMPLES = 10_000
SEED = 0  # of replies at a temperature
PROMPTS_AT_ONCE = 16  # of the target's own decoding


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Tokens per verify step, the target's own included: 1.0 is no help at all."""

    accept_length: float  # of the trained drafter, mean over prompts
    accept_length_untrained: float
    gain: float
    gain_low: float  # 95 % interval over prompts, paired bootstrap
    gain_high: float
    num_prompts: int  # judged
    num_loops: int  # left out
    loop_share: float  # of all prompts
    num_ties: int  # replies that part from the target's own at a tie
    num_faults: int  # replies that part elsewhere: speculation is broken
    by_prompt: list[float]  # of the trained drafter
    seconds: float


def evaluate(
    model_dir: str,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    *,
    start: Start,
    temperature: float = 0.0,
) -> Evaluation:
    """Measure on prompts that were not trained on. Raises NotEnough where all replies are loops."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(
        model_dir, drafter.config.target_layer_ids, dtype=torch.float32, device=device
    )
    drafter = drafter.to(device).eval()
    untrained = untrained_drafter(drafter.config, start, target.layers, target.norm)
    untrained.to(device).eval()
    replies = _decode_plainly(target, prompts, limits)
    choose = Sampler(temperature, SEED, device) if temperature else best_ids
    drafted = [
        (p, plain, decode_speculatively(target, drafter, p, limits, choose))
        for p, plain in zip(prompts, replies, strict=True)
        if _can_be_judged(plain)
    ]
    judged = [(p, plain, reply) for p, plain, reply in drafted if reply.tokens_by_step]
    if not judged:
        raise NotEnough(f"none of {len(prompts)} replies can be judged: all loop or are empty")
    before = [_mean(accepted_along(target, untrained, p, reply.ids)) for p, _, reply in judged]
    after = [_mean(reply.tokens_by_step) for _, _, reply in judged]
    partings = [] if temperature else [parting_gap(plain, r.ids) for _, plain, r in judged]
    low, high = bootstrap_interval(np.array(after) - np.array(before))
    num_loops = sum(is_repetitive(r.ids) for r in replies)
    return Evaluation(
        accept_length=_mean(after),
        accept_length_untrained=_mean(before),
        gain=_mean(after) - _mean(before),
        gain_low=low,
        gain_high=high,
        num_prompts=len(judged),
        num_loops=num_loops,
        loop_share=num_loops / len(prompts),
        num_ties=sum(gap is not None and gap <= TIE for gap in partings),
        num_faults=sum(gap is not None and gap > TIE for gap in partings),
        by_prompt=after,
        seconds=time.monotonic() - began,
    )


def bootstrap_interval(differences: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % interval of the mean of paired differences; the same input gives the same interval."""
    random = np.random.default_rng(0)
    picks = random.integers(len(differences), size=(NUM_RESAMPLES, len(differences)))
    low, high = np.quantile(differences[picks].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def parting_gap(plain: GreedyReply, ids: Sequence[int]) -> float | None:
    """The gap between the target's two best logits where `ids` part from its own reply."""
    if list(ids) == plain.ids:
        return None
    pairs = enumerate(zip(plain.ids, ids, strict=False))
    return next((plain.gaps[i] for i, (a, b) in pairs if a != b), float("inf"))


def _decode_plainly(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[GreedyReply]:
    replies: list[GreedyReply] = []
    for at in range(0, len(prompts), PROMPTS_AT_ONCE):
        replies += decode_greedily(target, prompts[at : at + PROMPTS_AT_ONCE], limits)
    return replies


def _can_be_judged(reply: GreedyReply) -> bool:
    return len(reply.ids) > 1 and not is_repetitive(reply.ids)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
