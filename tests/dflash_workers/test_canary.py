"""Another model behind the port is found before it answers anything."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from dflash_workers.canary import NUM_IDS, TEXT, Canary, Verdict, canary_ids, check_engine
from dflash_workers.contract.chat import Chat, load_tokenizer
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.store import Store
from dflash_workers.engine import Engine, Patience
from tests.fake_engine import FakeEngine

PATIENCE = Patience(request_s=2, token_s=0, away_s=0, backoff_s=0.05, abort_s=0.5)


class Checking:
    """Starts a worker's engine, as far as its check goes."""

    def __init__(self, fake: FakeEngine, spec: RunSpec, chat: Chat, store: Store) -> None:
        self.fake, self.spec, self.chat, self.store = fake, spec, chat, store

    def check(self, dialect: str = "sglang", **template_kwargs: Any) -> Verdict:
        spec = dataclasses.replace(self.spec, template_kwargs=template_kwargs)
        chat = dataclasses.replace(self.chat, template_kwargs=template_kwargs)

        async def once() -> Verdict:
            engine = Engine(self.fake.url, 4, PATIENCE, dialect=dialect, tokenizer=chat.tokenizer)
            try:
                await engine.look()
                return await check_engine(engine, spec, chat, self.store)
            finally:
                await engine.close()

        return asyncio.run(once())

    def standing(self) -> Canary:
        return load(Canary, self.store.get(RunKeys(self.spec.run).canary))


@pytest.fixture
def checking(engine: FakeEngine, spec: RunSpec, chat: Chat, store: Store) -> Checking:
    return Checking(engine, spec, chat, store)


def test_the_first_engine_writes_what_the_others_must_reproduce(checking: Checking) -> None:
    first, second = checking.check(), checking.check()

    assert (first.is_first, second.is_first) == (True, False)
    assert (first.warnings, second.warnings) == ([], [])
    assert second.mean_difference == second.largest_difference == 0
    standing = checking.standing()
    assert len(standing.ids) == NUM_IDS == len(standing.log_probs) + 1
    assert standing.engine == {"version": "0.5.17-fake", "dtype": "float32"}
    assert standing.stop_id == "included"


@pytest.mark.parametrize(
    ("dtype", "noise", "is_accepted"),
    [
        ("float32", 0.005, True),
        ("float32", 0.05, False),
        ("bfloat16", 0.05, True),
        ("bfloat16", 0.15, False),
    ],
)
def test_kernels_may_differ_and_weights_may_not(
    checking: Checking, dtype: str, noise: float, is_accepted: bool
) -> None:
    checking.fake.facts = {"dtype": dtype}
    checking.check()

    checking.fake.noise = noise
    if is_accepted:
        assert checking.check().mean_difference == pytest.approx(noise)
    else:
        with pytest.raises(BadInput, match="differ by"):
            checking.check()


def test_another_engine_is_named_in_one_line_with_what_differs(checking: Checking) -> None:
    checking.fake.facts = {"dtype": "bfloat16"}
    checking.check()

    checking.fake.facts = {"dtype": "bfloat16", "quantization": "fp8"}
    checking.fake.noise = 1.0
    with pytest.raises(BadInput) as caught:
        checking.check()

    message = str(caught.value)
    assert checking.fake.url in message
    assert f"not tiny as run {checking.spec.run!r} knows it" in message
    assert "quantization None there, 'fp8' here" in message
    assert "\n" not in message


def test_an_engine_without_log_probabilities_works_with_a_warning(checking: Checking) -> None:
    checking.fake.has_log_probs = False

    verdict = checking.check()

    assert verdict.mean_difference is None
    assert not verdict.is_first
    assert "weights are not checked" in verdict.warnings[0]
    assert not checking.store.exists(RunKeys(checking.spec.run).canary)


def test_the_openai_dialect_is_checked_as_far_as_it_goes(checking: Checking) -> None:
    verdict = checking.check("openai")

    assert verdict.mean_difference is None
    assert len(verdict.warnings) == 1


def test_an_engine_that_refuses_the_runs_sampling_rejects_no_prompt(checking: Checking) -> None:
    checking.fake.manner = "refuse"

    with pytest.raises(BadInput, match="refuses how run"):
        checking.check()


def test_a_stop_id_that_the_engine_leaves_out_is_found(checking: Checking) -> None:
    checking.fake.manner = "nostop"

    assert checking.check().stop_id == "appended"


def test_a_context_shorter_than_the_runs_is_said(checking: Checking) -> None:
    checking.fake.facts = {"context_length": 2048}

    (warning,) = checking.check().warnings

    assert "2048 ids, the run plans for 4096" in warning


def test_thinking_that_does_not_show_is_a_warning(checking: Checking) -> None:
    (warning,) = checking.check(enable_thinking=True).warnings

    assert "with thinking on" in warning


def test_thinking_that_can_be_switched_is_no_warning(checking: Checking) -> None:
    checking.fake.manner = "muse"

    assert checking.check(enable_thinking=False).warnings == []


def test_thinking_that_can_not_be_switched_off_is_a_warning(checking: Checking) -> None:
    checking.fake.manner = "musealways"

    (warning,) = checking.check(enable_thinking=False).warnings

    assert "with thinking off" in warning


def test_a_template_without_the_switch_is_a_warning(checking: Checking) -> None:
    template = checking.chat.template.replace("enable_thinking", "another_switch")
    checking.chat = dataclasses.replace(checking.chat, template=template)

    (warning,) = checking.check(enable_thinking=True).warnings

    assert "renders the same" in warning


def test_the_text_is_long_enough_and_the_same_for_all(chat: Chat, model_dir: Any) -> None:
    again = dataclasses.replace(chat, tokenizer=load_tokenizer(str(model_dir)))

    assert canary_ids(chat) == canary_ids(again)
    assert len(canary_ids(chat)) == NUM_IDS
    assert len(TEXT.split()) > NUM_IDS  # whatever the tokenizer
