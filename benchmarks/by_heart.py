"""A drafter that knows some replies by heart: it hits often there, and misses elsewhere.

Used by lossless.py, and by tests of decoding. What decides whether speculation changes a reply is
how drafts are kept and thrown away, so both must happen, many times; how well a drafter does on
text that it hasn't seen is no matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.drafter.anchors import draw_anchors
from trainer.drafter.blocks import BlockBatch, padded_positions
from trainer.drafter.config import DrafterConfig
from trainer.drafter.loss import LossRecipe
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.drafter.start import Start, untrained_drafter
from trainer.online.target import FrozenTarget

BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and its reply."""

    prompt: Sequence[int]
    reply: Sequence[int]


def learn_by_heart(
    target: FrozenTarget,
    config: DrafterConfig,
    known: Sequence[Known],
    *,
    num_steps: int,
    learning_rate: float,
) -> Drafter:
    """A drafter of the target after `num_steps` batches of the replies, over and over."""
    start = Start(seed=0, copies_target=True)
    drafter = untrained_drafter(config, start, target.layers, target.norm)
    objective = Objective(drafter, TargetEnds(target.embed, target.head_VD), LossRecipe(gamma=2.0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=learning_rate)
    parts = [known[i : i + BATCH_SIZE] for i in range(0, len(known), BATCH_SIZE)]
    features: dict[int, Tensor] = {}
    for step in range(num_steps):
        number = step % len(parts)
        batch = _batch(parts[number], step, target.head_VD.device)
        if number not in features:
            features[number] = target.features(batch.ids_BL)
        sums = objective.loss_sums(features[number], batch)
        optimizer.zero_grad()
        (sums.numerator / sums.weight).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval()


def _batch(part: Sequence[Known], step: int, device: torch.device) -> BlockBatch:
    rows = [[*known.prompt, *known.reply] for known in part]
    width, num_anchors = max(map(len, rows)), max(len(known.reply) for known in part)
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    anchors = [
        draw_anchors(len(k.prompt), len(row), num_anchors=num_anchors, draw=(0, step, str(i)))
        for i, (k, row) in enumerate(zip(part, rows, strict=True))
    ]
    return BlockBatch(
        torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device),
        padded_positions(lengths_B, width),
        torch.from_numpy(np.stack(anchors)).to(device),
    )
