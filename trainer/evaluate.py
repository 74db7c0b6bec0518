"""Does the drafter help: tokens per verify step on held-out prompts, against an untrained one.

Used by the `evaluate` verb and by demo.py, on an export of drafter/export.py. The target decodes
each prompt by itself and with the drafter (timing.py). Both replies must be the same, token by
token, at any temperature; a difference where another choice was less than TIE away is a tie, any
other is a fault. The untrained drafter, which training began with, is judged along the same
replies: the same measure, and quick. Prompts whose reply ends in a loop are left out: they are easy
to guess and nobody wants them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.flags import is_repetitive
from trainer.acceptance import Acceptance, Counted, acceptance, bootstrap_interval
from trainer.drafter.choices import Sampling
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import Limits, PlainReply, SpeculativeReply, accepted_along
from trainer.drafter.start import Start, untrained_drafter
from trainer.online.target import FrozenTarget, load_target
from trainer.timing import Decoded, Speed, decode_both_ways

TIE = 1e-4  # logits; at a temperature, probability


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and what is known of it."""

    ids: Sequence[int]
    source: str = "unknown"
    turn: int = 0
    thinks: bool = False  # the target thinks before it answers


@dataclass(frozen=True, slots=True)
class Terms:
    """How the target decodes."""

    limits: Limits
    temperature: float = 0.0
    seed: int = 0  # of replies at a temperature
    prompts_at_once: int = 8
    thinking_end_id: int = -1  # the id that ends the thinking; -1: there is none


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
    acceptance: Acceptance  # of the trained drafter
    speed: Speed | None  # of all prompts, loops included; None: see timing.py
    seconds: float


@dataclass(frozen=True, slots=True)
class _Judged:
    question: Question
    plain: PlainReply
    drafted: SpeculativeReply


def evaluate(
    model_dir: str,
    drafter: Drafter,
    questions: Sequence[Question],
    terms: Terms,
    *,
    start: Start | Drafter,
) -> Evaluation:
    """Measure on prompts that were not trained on; `start`: what training began with.

    Raises NotEnough where all replies are loops, BadInput where they are too long for their target:
    see drafter/target_rows.py.
    """
    began = time.monotonic()
    if not questions:
        raise NotEnough("no held-out prompt to measure on: plan some with --heldout, and tokenize")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(
        model_dir, drafter.config.target_layer_ids, dtype=torch.float32, device=device
    )
    drafter = drafter.to(device).eval()
    sampling = Sampling(terms.temperature, terms.seed)
    found = decode_both_ways(
        target, drafter, [q.ids for q in questions], terms.limits, sampling, terms.prompts_at_once
    )
    triples = zip(questions, found.plain, found.drafted, strict=True)
    judged = [_Judged(*t) for t in triples if _can_be_judged(*t[1:])]
    if not judged:
        raise NotEnough(f"none of {len(questions)} replies can be judged: all loop or are empty")
    if isinstance(start, Drafter):
        untrained = start
    else:
        untrained = untrained_drafter(drafter.config, start, target.layers, target.norm)
    along = _accepted_along(target, untrained.to(device).eval(), judged)
    return _summed_up(judged, along, found, terms, time.monotonic() - began)


def _summed_up(
    judged: Sequence[_Judged],
    untrained: list[float],
    found: Decoded,
    terms: Terms,
    seconds: float,
) -> Evaluation:
    trained = [_mean(j.drafted.tokens_by_step) for j in judged]
    low, high = bootstrap_interval(np.array(trained) - np.array(untrained))
    gaps = [parting_gap(j.plain, j.drafted.ids) for j in judged]
    num_loops = sum(is_repetitive(reply.ids) for reply in found.plain)
    return Evaluation(
        accept_length=_mean(trained),
        accept_length_untrained=_mean(untrained),
        gain=_mean(trained) - _mean(untrained),
        gain_low=low,
        gain_high=high,
        num_prompts=len(judged),
        num_loops=num_loops,
        loop_share=num_loops / len(found.plain),
        num_ties=sum(gap is not None and gap <= TIE for gap in gaps),
        num_faults=sum(gap is not None and gap > TIE for gap in gaps),
        by_prompt=trained,
        acceptance=acceptance([_counted(j, terms.thinking_end_id) for j in judged]),
        speed=found.speed,
        seconds=seconds,
    )


def parting_gap(plain: PlainReply, ids: Sequence[int]) -> float | None:
    """How near another choice was where `ids` part from the target's own reply."""
    if list(ids) == plain.ids:
        return None
    pairs = enumerate(zip(plain.ids, ids, strict=False))
    return next((plain.gaps[i] for i, (a, b) in pairs if a != b), float("inf"))


def _can_be_judged(plain: PlainReply, drafted: SpeculativeReply) -> bool:
    return len(plain.ids) > 1 and bool(drafted.tokens_by_step) and not is_repetitive(plain.ids)


def _accepted_along(
    target: FrozenTarget, drafter: Drafter, judged: Sequence[_Judged]
) -> list[float]:
    """Its mean tokens per step, of each."""
    return [_mean(accepted_along(target, drafter, j.question.ids, j.drafted.ids)) for j in judged]


def _counted(judged: _Judged, thinking_end_id: int) -> Counted:
    question, ids = judged.question, judged.drafted.ids
    if thinking_end_id in ids:
        num_thinking = ids.index(thinking_end_id) + 1
    else:
        num_thinking = len(ids) if question.thinks else 0
    return Counted(
        question.source,
        question.turn,
        judged.drafted.tokens_by_step,
        judged.drafted.hits_by_step,
        num_thinking,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
