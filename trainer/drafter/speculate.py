"""Decoding: the target alone, the target with a drafter, and a drafter judged along a known reply.

Used by evaluate.py, on the whole target in fp32. Invariant: speculation changes the speed and never
the reply, because each token is the target's own choice: its best one or, at a temperature, a
sample of its distribution, and a draft is kept where it is that choice. At a temperature this is
rejection sampling of drafts that are certain of themselves. Only where the target's two best logits
are a rounding error apart may another shape of the same computation choose the other.
A block is drafted from the features of all positions before its anchor: the anchor's own comes into
being when the target verifies the block. Source: arXiv 2602.06036, section 4.3.

B batch, L context length, K block size, V vocab.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from trainer.drafter.model import Drafter
from trainer.online.target import FrozenTarget

Choose = Callable[[Tensor], list[int]]  # logits, [L, V] -> an id for each row


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a reply ends."""

    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class GreedyReply:
    """What the target says by itself."""

    ids: list[int]  # with the stop id, where it ended by one
    gaps: list[float]  # between the two best logits, at each id


@dataclass(frozen=True, slots=True)
class SpeculativeReply:
    """What the target says with a drafter's help."""

    ids: list[int]
    tokens_by_step: list[int]  # of each verify step: the drafts that hit and the target's own


def best_ids(logits_LV: Tensor) -> list[int]:
    """The choice at temperature 0."""
    best: list[int] = logits_LV.argmax(-1).tolist()
    return best


class Sampler:
    """Choices at a temperature above 0; the same seed makes the same ones on the same device."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self._temperature = temperature
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits_LV: Tensor) -> list[int]:
        probs_LV = (logits_LV.float() / self._temperature).softmax(-1)
        drawn: list[int] = torch.multinomial(probs_LV, 1, generator=self._generator)[:, 0].tolist()
        return drawn


@torch.inference_mode()
def decode_greedily(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[GreedyReply]:
    """The target's own replies, of all prompts at once."""
    device = target.head_VD.device
    width = max(len(p) for p in prompts)
    ids_BL = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    lengths_B = torch.tensor([len(p) for p in prompts], device=device)
    is_real_BL = torch.arange(width, device=device) >= (width - lengths_B)[:, None]
    positions_BL = (is_real_BL.cumsum(1) - 1).clamp_min(0)
    cache = _Cache(target, goes_back=False)
    replies = [GreedyReply([], []) for _ in prompts]
    for _ in range(limits.max_new_tokens):
        logits_BV = cache.extend(ids_BL, positions_BL, is_real_BL)[:, -1]
        best = logits_BV.topk(2)
        ids_BL, positions_BL = best.indices[:, :1], positions_BL[:, -1:] + 1
        is_real_BL = torch.cat((is_real_BL, is_real_BL.new_ones(len(prompts), 1)), dim=1)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        for reply, new_id, gap in zip(replies, ids_BL[:, 0].tolist(), gaps, strict=True):
            if not (reply.ids and reply.ids[-1] in limits.stop_ids):
                reply.ids.append(new_id)
                reply.gaps.append(gap)
        if all(r.ids[-1] in limits.stop_ids for r in replies):
            break
    return replies


@torch.inference_mode()
def decode_speculatively(
    target: FrozenTarget,
    drafter: Drafter,
    prompt: Sequence[int],
    limits: Limits,
    choose: Choose = best_ids,
) -> SpeculativeReply:
    """One reply by drafting and verifying."""
    device = target.head_VD.device
    cache = _Cache(target, goes_back=True)
    ids = list(prompt)
    ids += choose(cache.append(torch.tensor([ids], device=device))[-1:])
    cache.drop_last(0)
    context = drafter.read_context(target.take_features())
    tokens_by_step: list[int] = []
    while len(ids) - len(prompt) < limits.max_new_tokens and ids[-1] not in limits.stop_ids:
        start = len(ids) - 1
        anchors_BA = torch.tensor([[start]], device=device)
        ids_BL = torch.tensor([ids], device=device)
        drafts = _draft(target, drafter, ids_BL, anchors_BA, context)[0]
        chosen = choose(cache.append(torch.tensor([[ids[-1], *drafts]], device=device)))
        num_hits = _num_hits(drafts, chosen)
        cache.drop_last(len(drafts) - num_hits)
        new_context = drafter.read_context(
            target.take_features()[:, : num_hits + 1], first_position=start
        )
        context = [
            (torch.cat((k, new_k), dim=2), torch.cat((v, new_v), dim=2))
            for (k, v), (new_k, new_v) in zip(context, new_context, strict=True)
        ]
        room = limits.max_new_tokens - (len(ids) - len(prompt))
        new_ids = _until_stop(chosen[: num_hits + 1][:room], limits.stop_ids)
        tokens_by_step.append(len(new_ids))
        ids += new_ids
    return SpeculativeReply(ids[len(prompt) :], tokens_by_step)


@torch.inference_mode()
def accepted_along(
    target: FrozenTarget, drafter: Drafter, prompt: Sequence[int], reply: Sequence[int]
) -> list[int]:
    """The `tokens_by_step` that speculation would have along the target's known reply.

    One forward each of target and drafter: every token of the reply is an anchor at once, as in
    training.
    """
    ids = [*prompt, *reply]
    ids_BL = torch.tensor([ids], device=target.head_VD.device)
    anchors_BA = torch.arange(len(prompt), len(ids), device=ids_BL.device)[None]
    context = drafter.read_context(target.features(ids_BL))
    drafts = _draft(target, drafter, ids_BL, anchors_BA, context)
    tokens_by_step = []
    place = 0
    while place + 1 < len(reply):
        rest = reply[place + 1 :]
        tokens_by_step.append(min(_num_hits(drafts[place], rest) + 1, len(rest)))
        place += tokens_by_step[-1]
    return tokens_by_step


class _Cache:
    """The target's keys and values, and the forward that grows them."""

    def __init__(self, target: FrozenTarget, *, goes_back: bool) -> None:
        self._model = target.model
        self._cache = DynamicCache(config=target.model.config)
        if goes_back:  # layers that keep a window or a state must be told beforehand
            self._cache.activate_past_recording()
        known = inspect.signature(self._model.forward).parameters
        self._name = "cache" if "cache" in known else "past_key_values"  # before 5.24

    def extend(self, ids_BL: Tensor, positions_BL: Tensor, is_real_BL: Tensor | None) -> Tensor:
        """Logits, [B, L, V], of ids that follow what the cache holds."""
        output = self._model(
            input_ids=ids_BL,
            position_ids=positions_BL,
            attention_mask=None if is_real_BL is None else is_real_BL.long(),
            use_cache=True,
            **{self._name: self._cache},
        )
        logits: Tensor = output.logits
        return logits

    def append(self, ids_BL: Tensor) -> Tensor:
        """Logits, [L, V], of what follows each of one sequence's ids."""
        first = self._cache.get_seq_length()
        positions_BL = torch.arange(first, first + ids_BL.shape[1], device=ids_BL.device)[None]
        return self.extend(ids_BL, positions_BL, None)[0]

    def drop_last(self, num_tokens: int) -> None:
        """Forget ids; with 0, only what was kept to be able to."""
        self._cache.crop(-num_tokens)


def _draft(
    target: FrozenTarget,
    drafter: Drafter,
    ids_BL: Tensor,
    anchors_BA: Tensor,
    context: list[tuple[Tensor, Tensor]],
) -> list[list[int]]:
    """The ids that the drafter proposes after each anchor of one sequence."""
    embedded_BQD = target.embed(drafter.block_ids(ids_BL, anchors_BA))
    hidden_BQD = drafter(embedded_BQD, context, anchors_BA)
    hidden_AKD = hidden_BQD[0].unflatten(0, (-1, drafter.config.block_size))
    head = drafter.markov_head
    drafts: list[list[int]] = head.draft(
        hidden_AKD, ids_BL[0, anchors_BA[0]], target.head_VD
    ).tolist()
    return drafts


def _num_hits(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(drafts, truth, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(truth)))


def _until_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((i + 1 for i, x in enumerate(ids) if x in stop_ids), len(ids))
    return ids[:end]
