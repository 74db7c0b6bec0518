"""Acceptance along held-out answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from trainer.drafter.config import DrafterConfig
from trainer.drafter.model import Drafter
from trainer.drafter.objective import TargetEnds
from trainer.drafter.speculate import accepted_along
from trainer.drafter.start import start_at_random
from trainer.online import measuring
from trainer.online.batches import DataRecipe
from trainer.online.measuring import Heldout, heldout_batches, measured_accept_length
from trainer.online.step import Fed
from trainer.online.target import load_target
from trainer.tokens.shards import Sample

MakeSamples = Callable[..., list[Sample]]
RECIPE = DataRecipe(batch_size=4, num_anchors=5, max_len=64)


@pytest.mark.parametrize("at_once", [3, 64])
def test_the_walk_is_the_one_that_speculation_would_take(
    qwen_dir: Path,
    small_config: DrafterConfig,
    make_samples: MakeSamples,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
) -> None:
    monkeypatch.setattr(measuring, "BLOCKS_AT_ONCE", at_once)
    target = load_target(str(qwen_dir), [1, 3], dtype=torch.float32, device=torch.device("cpu"))
    drafter = Drafter(small_config)
    start_at_random(drafter, 0)
    samples = make_samples(4, heldout=True)
    with torch.no_grad():  # answers that it half knows: its own drafts, with errors strewn in
        for sample in samples:
            sample.ids[sample.prompt_len :: 3] = 7
        target.model.get_output_embeddings().weight[7] *= 3
    ends = TargetEnds(target.embed, target.head_VD)

    length = measured_accept_length(
        drafter,
        ends,
        (
            (Fed(batch, target.features(batch.ids_BL), None), prompt_len)
            for batch, prompt_len in heldout_batches(samples, RECIPE)
        ),
    )

    means = []
    for s in samples:
        prompt, reply = s.ids[: s.prompt_len].tolist(), s.ids[s.prompt_len :].tolist()
        steps = accepted_along(target, drafter, prompt, reply)
        means.append(sum(steps) / len(steps))
    assert length == pytest.approx(sum(means) / len(means))


def test_the_choice_grows_until_it_is_full_and_then_stands(make_samples: MakeSamples) -> None:
    arrived = make_samples(2, heldout=True)

    class Arriving(Iterator[Sample]):
        def __next__(self) -> Sample:
            if not arrived:
                raise StopIteration
            return arrived.pop(0)

    heldout = Heldout(Arriving(), RECIPE, 3)

    first = list(heldout.choose())
    arrived += make_samples(5, heldout=True)
    second = list(heldout.choose())
    third = list(heldout.choose())

    assert (len(first), len(second)) == (2, 3)
    assert second[:2] == first
    assert third == second
