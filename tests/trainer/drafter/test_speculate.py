"""Speculation says what the target says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.by_heart import Known, learn_by_heart
from trainer.drafter.choices import Sampling
from trainer.drafter.config import DrafterShape
from trainer.drafter.fitting import drafter_config
from trainer.drafter.model import Drafter
from trainer.drafter.speculate import (
    Limits,
    accepted_along,
    decode_plainly,
    decode_speculatively,
)
from trainer.online.target import FrozenTarget, load_target, target_config

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
def drafter(request: pytest.FixtureRequest, target_dir: Path, target: FrozenTarget) -> Drafter:
    """Trained on the very replies, so that drafts do hit."""
    replies = decode_plainly(target, PROMPTS, LIMITS)
    known = [Known(p, r.ids) for p, r in zip(PROMPTS, replies, strict=True)]
    shape = DrafterShape(1, 4, target_layer_ids=[1, 3], markov_rank=request.param)
    config = drafter_config(target_config(str(target_dir)), shape, str(target_dir))
    return learn_by_heart(target, config, known, num_steps=40, learning_rate=1e-2)


def test_the_targets_own_reply_is_what_transformers_generates(
    target: FrozenTarget, target_dir: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    model.generation_config = GenerationConfig()

    replies = decode_plainly(target, PROMPTS, LIMITS)

    for prompt, reply in zip(PROMPTS, replies, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False
        )
        assert reply.ids == generated[0, len(prompt) :].tolist()


def test_speculation_changes_no_token_and_saves_steps(
    target: FrozenTarget, drafter: Drafter
) -> None:
    plain = decode_plainly(target, PROMPTS, LIMITS)

    replies = decode_speculatively(target, drafter, PROMPTS, LIMITS)

    assert [r.ids for r in replies] == [r.ids for r in plain]
    assert all(sum(r.tokens_by_step) == 15 for r in replies)  # the first comes with the prompt
    assert np.mean([n for r in replies for n in r.tokens_by_step]) > 1.5


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_prompt_is_decoded_among_others_as_it_is_alone(
    target: FrozenTarget, drafter: Drafter, temperature: float
) -> None:
    together = decode_speculatively(target, drafter, PROMPTS, LIMITS, Sampling(temperature, seed=5))

    for number, (prompt, reply) in enumerate(zip(PROMPTS, together, strict=True)):
        sampling = Sampling(temperature, seed=5, first_number=number)
        assert decode_speculatively(target, drafter, [prompt], LIMITS, sampling) == [reply]


def test_a_sampled_reply_is_the_one_that_the_target_samples_by_itself(
    target: FrozenTarget, drafter: Drafter
) -> None:
    sampling = Sampling(temperature=0.7, seed=3)

    plain = decode_plainly(target, PROMPTS, LIMITS, sampling)
    drafted = decode_speculatively(target, drafter, PROMPTS, LIMITS, sampling)

    assert [r.ids for r in drafted] == [r.ids for r in plain]
    assert plain != decode_plainly(target, PROMPTS, LIMITS, Sampling(0.7, seed=4))
    assert all(gap >= 0 for r in plain for gap in r.gaps)


def test_hits_are_counted_beyond_the_end_of_a_reply(target: FrozenTarget, drafter: Drafter) -> None:
    (reply,) = decode_speculatively(target, drafter, PROMPTS[:1], Limits(16, frozenset()))

    pairs = list(zip(reply.tokens_by_step, reply.hits_by_step, strict=True))
    assert all(tokens == hits + 1 for tokens, hits in pairs[:-1])
    assert pairs[-1][0] <= pairs[-1][1] + 1


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
    likely = decode_plainly(target, [prompt], limits)[0].ids
    # The drafter knows the greedy reply: it is to be hit often and missed often.
    temperature = next(
        t
        for t in (0.01 * 1.3**n for n in range(40))
        if probability(target, prompt, likely, t) < 0.6
    )

    replies = decode_speculatively(
        target, drafter, [prompt] * num_replies, limits, Sampling(temperature)
    )

    counts = Counter(tuple(r.ids) for r in replies)
    assert len(counts) > 1
    for ids, count in counts.most_common(5):
        share = probability(target, prompt, ids, temperature)
        assert abs(count / num_replies - share) < 5 * (share * (1 - share) / num_replies) ** 0.5
    assert max(n for r in replies for n in r.tokens_by_step) > 1


def test_decoding_accepts_what_training_predicts(target: FrozenTarget, drafter: Drafter) -> None:
    replies = decode_speculatively(target, drafter, PROMPTS, LIMITS)

    along = [
        accepted_along(target, drafter, p, r.ids) for p, r in zip(PROMPTS, replies, strict=True)
    ]

    assert along == [r.tokens_by_step for r in replies]


def test_a_stop_id_ends_the_reply_in_the_middle_of_a_block(
    target: FrozenTarget, drafter: Drafter
) -> None:
    wholes = [reply.ids for reply in decode_plainly(target, PROMPTS, LIMITS)]
    for stop_id in set(wholes[0][:6]):
        limits = Limits(16, frozenset([stop_id]))
        until_stop = [w[: w.index(stop_id) + 1] if stop_id in w else w for w in wholes]

        plain = decode_plainly(target, PROMPTS, limits)
        drafted = decode_speculatively(target, drafter, PROMPTS, limits)

        assert [r.ids for r in plain] == until_stop
        assert [r.ids for r in drafted] == until_stop
