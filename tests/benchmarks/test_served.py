"""What is said of a served export, from replies that are written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.served import Asked, Replies, figures_of, main, partings
from dflash_workers.contract.chat import load_tokenizer
from tests.fake_engine import FakeEngine
from tests.tiny_model import make_tiny_model

PLAIN = Replies([[5, 6, 7, 8], [9, 10, 11]], [0, 0], seconds=2.0)


def figure(replies: Replies, ours: Replies, name: str) -> float:
    found = {f.figure: f.value for f in figures_of(PLAIN, replies, ours)}
    return found[f"served.{name}"]


def test_the_first_token_is_nobodys_draft() -> None:
    drafted = Replies(PLAIN.ids, [1, 2], seconds=1.0)

    assert drafted.accept_length == pytest.approx((3 / 1 + 2 / 2) / 2)


def test_shares_and_ratios_are_those_of_the_replies() -> None:
    drafted = Replies([[5, 6, 7, 8], [9, 10, 12]], [1, 2], seconds=1.0)
    ours = Replies(PLAIN.ids, [2, 1], seconds=9.0)

    assert figure(drafted, ours, "equal_share") == 0.5
    assert figure(drafted, ours, "accept_length") == pytest.approx(2.0)
    assert figure(drafted, ours, "accept_length_pytorch") == pytest.approx((1.5 + 2) / 2)
    assert figure(drafted, ours, "accept_difference") == pytest.approx(0.25 / 1.75)
    assert figure(drafted, ours, "speedup_1") == 2.0


def test_a_reply_that_ended_with_its_first_token_has_no_steps_to_count() -> None:
    drafted = Replies([[5], [9, 10, 11]], [0, 1], seconds=1.0)

    assert drafted.accept_length == 2.0


def test_a_parting_is_named_with_the_gap_between_the_two_best(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny", weights=True)
    asked = Asked([[11, 12, 13], [200, 7]], [], 4)
    changed = Replies([[5, 6, 99, 8], [9, 10, 11]], [1, 1], seconds=1.0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[11, 12, 13, 5, 6]])).logits[0, -1].sort().values

    lines = partings(PLAIN, changed, str(model_dir), asked)

    assert lines == [f"- prompt 0, token 2: {float(logits[-1] - logits[-2]):.4f}"]


def test_held_out_prompts_are_asked_and_written_down(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "tiny")
    asked, plain = tmp_path / "asked.json", tmp_path / "plain.json"
    with FakeEngine(load_tokenizer(str(model_dir))) as engine:
        main(["prompts", "--model", str(model_dir), "--count", "3", "--out", str(asked)])
        main(["ask", "--url", engine.url, "--prompts", str(asked), "--out", str(plain)])

    found = Replies(**json.loads(plain.read_bytes()))
    prompts = Asked(**json.loads(asked.read_bytes())).prompts
    assert [len(ids) > 1 for ids in found.ids] == [True] * 3
    assert [request["input_ids"] for request in engine.requests[1:]] == prompts
