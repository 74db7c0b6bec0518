"""Speculation says what the target says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trainer.drafter.model import Drafter
from trainer.drafter.speculate import (
    Limits,
    Sampler,
    accepted_along,
    decode_greedily,
    decode_speculatively,
)
from trainer.online.checkpoint import read_drafter
from trainer.online.target import FrozenTarget, load_target
from trainer.online.train import TrainPaths, train_on
from trainer.recipes import named_recipe
from trainer.tokens.shards import Sample

PROMPTS = [[11, 12, 13, 14, 15], [200, 7, 31], [90, 91, 300, 301, 302, 303, 17], [42, 43, 44, 45]]
LIMITS = Limits(max_new_tokens=16, stop_ids=frozenset())


@pytest.fixture(scope="module", params=["qwen_dir", "llama_dir", "window_dir"])
def target_dir(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="module")
def target(target_dir: Path) -> FrozenTarget:
    return load_target(str(target_dir), [1, 3], dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module", params=[0, 8], ids=["plain", "dspark"])
def drafter(
    request: pytest.FixtureRequest,
    target_dir: Path,
    target: FrozenTarget,
    tmp_path_factory: pytest.TempPathFactory,
) -> Drafter:
    """Trained on the very replies, so that drafts do hit."""
    replies = decode_greedily(target, PROMPTS, LIMITS)
    samples = [
        Sample(str(i), "", 0, np.array(p + r.ids, np.int32), len(p), -1, False, "length", [])
        for i, (p, r) in enumerate(zip(PROMPTS, replies, strict=True))
    ]
    changes = ["num_steps=80", "data.min_samples=1", "optimizer.learning_rate=1e-2"]
    changes += ["drafter.target_layer_ids=[1,3]", f"drafter.markov_rank={request.param}"]
    recipe = named_recipe("smollm2_cpu", changes)
    out = tmp_path_factory.mktemp("drafter")
    paths = TrainPaths(str(target_dir), out)
    report = train_on(
        samples, recipe=recipe, paths=paths, provenance={}, on_step=lambda step, metrics: None
    )
    return read_drafter(Path(report.checkpoint_dir)).eval()


def test_the_targets_own_reply_is_what_transformers_generates(
    target: FrozenTarget, target_dir: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    model.generation_config = GenerationConfig()

    replies = decode_greedily(target, PROMPTS, LIMITS)

    for prompt, reply in zip(PROMPTS, replies, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        assert reply.ids == generated[0, len(prompt) :].tolist()


def test_speculation_changes_no_token_and_saves_steps(
    target: FrozenTarget, drafter: Drafter
) -> None:
    plain = decode_greedily(target, PROMPTS, LIMITS)

    replies = [decode_speculatively(target, drafter, p, LIMITS) for p in PROMPTS]

    assert [r.ids for r in replies] == [r.ids for r in plain]
    assert all(sum(r.tokens_by_step) == 15 for r in replies)  # the first comes with the prompt
    assert np.mean([n for r in replies for n in r.tokens_by_step]) > 1.5


@torch.no_grad()
def probability(
    target: FrozenTarget, prompt: list[int], ids: Sequence[int], temperature: float
) -> float:
    """Of the reply that begins with `ids`, by one forward over all of it."""
    logits_LV = target.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    probs_LV = (logits_LV.double() / temperature).softmax(-1)
    return float(probs_LV[torch.arange(len(ids)), list(ids)].prod())


def test_sampled_speculation_has_the_targets_own_distribution(
    target: FrozenTarget, drafter: Drafter
) -> None:
    prompt, num_replies = PROMPTS[0], 120
    limits = Limits(max_new_tokens=3, stop_ids=frozenset())
    likely = decode_greedily(target, [prompt], limits)[0].ids
    # The drafter knows the greedy reply: it is to be hit often and missed often.
    temperature = next(
        t
        for t in (0.01 * 1.3**n for n in range(40))
        if probability(target, prompt, likely, t) < 0.6
    )
    choose = Sampler(temperature, seed=0, device=torch.device("cpu"))

    replies = [
        decode_speculatively(target, drafter, prompt, limits, choose) for _ in range(num_replies)
    ]

    counts = Counter(tuple(r.ids) for r in replies)
    assert len(counts) > 1
    for ids, count in counts.most_common(5):
        share = probability(target, prompt, ids, temperature)
        assert abs(count / num_replies - share) < 5 * (share * (1 - share) / num_replies) ** 0.5
    assert max(n for r in replies for n in r.tokens_by_step) > 1


def test_decoding_accepts_what_training_predicts(target: FrozenTarget, drafter: Drafter) -> None:
    replies = [decode_speculatively(target, drafter, p, LIMITS) for p in PROMPTS]

    along = [
        accepted_along(target, drafter, p, r.ids) for p, r in zip(PROMPTS, replies, strict=True)
    ]

    assert along == [r.tokens_by_step for r in replies]


def test_a_stop_id_ends_the_reply_in_the_middle_of_a_block(
    target: FrozenTarget, drafter: Drafter
) -> None:
    for prompt in PROMPTS[:2]:
        whole = decode_greedily(target, [prompt], LIMITS)[0].ids
        for stop_id in set(whole[:6]):
            limits = Limits(16, frozenset([stop_id]))
            until_stop = whole[: whole.index(stop_id) + 1]

            assert decode_greedily(target, [prompt], limits)[0].ids == until_stop
            assert decode_speculatively(target, drafter, prompt, limits).ids == until_stop
