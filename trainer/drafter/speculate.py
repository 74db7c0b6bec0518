"""Decoding: the target alone, the target with a drafter, and a drafter judged along a known reply.

Used by evaluate.py and parity.py, on the whole target in fp32, for several prompts at once.
Invariant: speculation changes the speed and never the reply, because each token is the target's own
choice (choices.py) and a draft is kept where it is that choice. At a temperature this is rejection
sampling of drafts that are certain of themselves. Only where another choice is a rounding error
away may another shape of the same computation make it.
A block is drafted from the features of all positions before its anchor: the anchor's own comes into
being when the target verifies the block. Source: arXiv 2602.06036, section 4.3.

B rows (the prompts that are going on), A anchors, L new tokens of a row, N drafts of a block,
F features of the target, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.drafter.choices import GREEDY, Chooser, Sampling
from trainer.drafter.model import Drafter, KeysValues
from trainer.drafter.row_cache import RowBuffer
from trainer.drafter.target_rows import TargetRows, open_rows
from trainer.online.target import FrozenTarget

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a reply ends."""

    max_new_tokens: int
    stop_ids: frozenset[int]

    def cut(self, new_ids: list[int], num_before: int) -> list[int]:
        """What belongs to a reply that has `num_before` ids."""
        new_ids = new_ids[: self.max_new_tokens - num_before]
        stops = (i + 1 for i, x in enumerate(new_ids) if x in self.stop_ids)
        return new_ids[: next(stops, len(new_ids))]

    def are_reached(self, ids: Sequence[int]) -> bool:
        """Whether a reply is complete."""
        return len(ids) >= self.max_new_tokens or ids[-1] in self.stop_ids


@dataclass(frozen=True, slots=True)
class PlainReply:
    """What the target says by itself."""

    ids: list[int] = field(default_factory=list)  # with the stop id, where it ended by one
    gaps: list[float] = field(default_factory=list)  # to another choice, at each: see choices.py


@dataclass(frozen=True, slots=True)
class SpeculativeReply:
    """What the target says with a drafter's help."""

    ids: list[int] = field(default_factory=list)
    # Of each verify step: the drafts that hit and the target's own token, up to the reply's end.
    tokens_by_step: list[int] = field(default_factory=list)
    hits_by_step: list[int] = field(default_factory=list)  # drafts, whether or not it ended there

    def accept(self, drafts: list[int], chosen: list[int], limits: Limits) -> None:
        """A step: what the target chose behind the anchor and behind each draft."""
        num_hits = _num_hits(drafts, chosen)
        new_ids = limits.cut(chosen[: num_hits + 1], len(self.ids))
        self.ids.extend(new_ids)
        self.tokens_by_step.append(len(new_ids))
        self.hits_by_step.append(num_hits)


@torch.inference_mode()
def decode_plainly(
    target: FrozenTarget, prompts: Prompts, limits: Limits, sampling: Sampling = GREEDY
) -> list[PlainReply]:
    """The target's own replies, of all prompts at once. Raises BadInput: see target_rows.py."""
    device = target.head_VD.device
    replies = [PlainReply() for _ in prompts]
    going = _Going(prompts, replies, limits, device)
    rows = open_rows(target, max(map(len, prompts)) + limits.max_new_tokens)
    chooser = Chooser(sampling, len(prompts), limits.max_new_tokens, device)
    logits_B1V = going.read_prompts(rows)
    while True:
        ids_B1, gaps_B1 = chooser.choose_with_gaps(logits_B1V, going.numbers_B(), going.places_B())
        found = zip(going.numbers, ids_B1[:, 0].tolist(), gaps_B1[:, 0].tolist(), strict=True)
        for number, new_id, gap in found:
            replies[number].ids.append(new_id)
            replies[number].gaps.append(gap)
        rows.keep(going.leave())
        if not going.numbers:
            return replies
        anchors_B = going.anchors_B()
        logits_B1V = rows.read(going.last_ids_B1(), anchors_B, torch.zeros_like(anchors_B)[:, None])


@torch.inference_mode()
def decode_speculatively(
    target: FrozenTarget,
    drafter: Drafter,
    prompts: Prompts,
    limits: Limits,
    sampling: Sampling = GREEDY,
) -> list[SpeculativeReply]:
    """Their replies by drafting and verifying. Raises BadInput: see target_rows.py."""
    device, num_places = target.head_VD.device, limits.max_new_tokens + drafter.config.num_drafts
    replies = [SpeculativeReply() for _ in prompts]
    going = _Going(prompts, replies, limits, device)
    rows = open_rows(target, max(map(len, prompts)) + num_places)
    context = _Context(drafter, max(map(len, prompts)) + num_places)
    chooser = Chooser(sampling, len(prompts), num_places, device)
    first_B1 = chooser.choose(going.read_prompts(rows), going.numbers_B(), going.places_B())
    context.extend(rows.features(), torch.zeros_like(first_B1[:, 0]))
    for reply, new_id in zip(replies, first_B1[:, 0].tolist(), strict=True):
        reply.ids.append(new_id)
    while True:
        kept_B = going.leave()
        if not going.numbers:
            return replies
        rows.keep(kept_B)
        context.keep(kept_B)
        anchors_B, last_B1 = going.anchors_B(), going.last_ids_B1()
        seen = context.read(int(anchors_B.max()))
        drafts_BN = _draft(target, drafter, last_B1, anchors_B[:, None], seen)[:, 0]
        block_BL = torch.cat((last_B1, drafts_BN), dim=1)
        every_BL = torch.arange(block_BL.shape[1], device=device).expand_as(block_BL)
        logits_BLV = rows.read(block_BL, anchors_B, every_BL)
        context.extend(rows.features(), anchors_B)
        chosen_BL = chooser.choose(logits_BLV, going.numbers_B(), going.places_B())
        found = zip(going.numbers, drafts_BN.tolist(), chosen_BL.tolist(), strict=True)
        for number, drafts, chosen in found:
            replies[number].accept(drafts, chosen, limits)


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
    drafts = _draft(target, drafter, ids_BL[:, len(prompt) :], anchors_BA, context)[0].tolist()
    tokens_by_step = []
    place = 0
    while place + 1 < len(reply):
        rest = reply[place + 1 :]
        tokens_by_step.append(min(_num_hits(drafts[place], rest) + 1, len(rest)))
        place += tokens_by_step[-1]
    return tokens_by_step


class _Going:
    """The prompts whose replies are not complete, in the order of the rows."""

    def __init__(
        self,
        prompts: Prompts,
        replies: Sequence[PlainReply | SpeculativeReply],
        limits: Limits,
        device: torch.device,
    ) -> None:
        self.numbers = list(range(len(prompts)))
        self._prompts, self._replies = prompts, replies
        self._limits, self._device = limits, device

    def read_prompts(self, rows: TargetRows) -> Tensor:
        """Logits, [B, 1, V], of what follows each prompt."""
        width = max(map(len, self._prompts))
        ids_BL = [[*prompt, *[0] * (width - len(prompt))] for prompt in self._prompts]
        last_B1 = self._tensor([len(prompt) - 1 for prompt in self._prompts])[:, None]
        return rows.read(self._tensor(ids_BL), torch.zeros_like(last_B1[:, 0]), last_B1)

    def leave(self) -> Tensor:
        """Complete replies leave; which rows are kept."""
        is_kept = [not self._limits.are_reached(self._replies[n].ids) for n in self.numbers]
        kept = [row for row, keep in enumerate(is_kept) if keep]
        self.numbers = [self.numbers[row] for row in kept]
        return self._tensor(kept)

    def numbers_B(self) -> Tensor:
        """Which prompts they are."""
        return self._tensor(self.numbers)

    def places_B(self) -> Tensor:
        """Of the next token in each reply."""
        return self._tensor([len(self._replies[n].ids) for n in self.numbers])

    def anchors_B(self) -> Tensor:
        """Positions of the last tokens: those that the target has not read yet."""
        ends = [len(self._prompts[n]) + len(self._replies[n].ids) for n in self.numbers]
        return self._tensor(ends) - 1

    def last_ids_B1(self) -> Tensor:
        """Those tokens."""
        return self._tensor([[self._replies[n].ids[-1]] for n in self.numbers])

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


class _Context:
    """The drafter's keys and values of the target's features, for rows of unlike length."""

    def __init__(self, drafter: Drafter, capacity: int) -> None:
        self._drafter = drafter
        self._buffers = [(RowBuffer(capacity), RowBuffer(capacity)) for _ in drafter.layers]

    def extend(self, features_BLF: Tensor, starts_B: Tensor) -> None:
        """Features of the positions `starts_B` and on, over what was there."""
        places_L = torch.arange(features_BLF.shape[1], device=starts_B.device)
        positions_BL = starts_B[:, None] + places_L
        found = self._drafter.inject(features_BLF, self._drafter.rotary(positions_BL))
        for buffers, new in zip(self._buffers, found, strict=True):
            for buffer, states in zip(buffers, new, strict=True):
                buffer.write(states, positions_BL)

    def read(self, width: int) -> list[KeysValues]:
        """Of the first `width` positions; the drafter's mask hides what is stale."""
        return [(keys.read(width), values.read(width)) for keys, values in self._buffers]

    def keep(self, rows: Tensor) -> None:
        """These rows alone go on."""
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.keep(rows)


def _draft(
    target: FrozenTarget,
    drafter: Drafter,
    anchor_ids_BA: Tensor,
    anchors_BA: Tensor,
    context: list[KeysValues],
) -> Tensor:
    """The ids, [B, A, N], that the drafter proposes after each anchor."""
    places_BA = torch.arange(anchors_BA.shape[1], device=anchors_BA.device).expand_as(anchors_BA)
    embedded_BQD = target.embed(drafter.block_ids(anchor_ids_BA, places_BA))
    hidden_BQD = drafter(embedded_BQD, context, anchors_BA)
    hidden_XKD = hidden_BQD.reshape(-1, drafter.config.block_size, hidden_BQD.shape[-1])
    drafts_XN = drafter.markov_head.draft(hidden_XKD, anchor_ids_BA.flatten(), target.head_VD)
    return drafts_XN.view(*anchors_BA.shape, -1)


def _num_hits(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(drafts, truth, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(truth)))
