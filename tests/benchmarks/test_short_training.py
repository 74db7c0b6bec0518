"""Answers of a server become an export, by way of the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.short_training import main
from benchmarks.varied_prompts import varied_prompts
from dflash_workers.contract.chat import load_tokenizer, open_chat
from tests.fake_engine import FakeEngine
from tests.tiny_model import TEMPLATE, make_tiny_model
from trainer.drafter.export import lint


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on shared cores take many times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_servers_answers_are_trained_on_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = str(make_tiny_model(tmp_path / "tiny", weights=True))
    chat = open_chat(model_dir, TEMPLATE, {})
    asked = [f"count=12 {number}" for number in range(10)]  # what the engine heeds
    prompts = [chat.prompt_ids([{"role": "user", "content": text}], []) for text in asked]
    monkeypatch.setattr("benchmarks.short_training.varied_prompts", lambda *_, **__: prompts)
    answers, out = tmp_path / "answers.json", tmp_path / "out"
    changes = ["num_steps=2", "data.max_len=4096", "drafter.target_layer_ids=[0]"]
    sets = [word for change in changes for word in ("--set", change)]
    with FakeEngine(load_tokenizer(model_dir)) as engine:
        asking = ["answer", "--url", engine.url, "--count", "10", "--out", str(answers)]
        main([*asking, "--model", model_dir])
    training = ["train", "--model", model_dir, "--answers", str(answers), "--out", str(out)]
    main([*training, "--recipe", "smollm2_cpu", *sets])

    written = json.loads(answers.read_bytes())
    assert written["prompts"] == prompts
    assert all(len(reply) > 10 for reply in written["replies"])
    assert lint(out / "export", "sglang==0.5.17").target_layer_ids == [0]


def test_held_out_prompts_are_other_texts_than_the_known_ones(tmp_path: Path) -> None:
    model_dir = str(make_tiny_model(tmp_path / "tiny"))
    tokenizer = load_tokenizer(model_dir)

    known = varied_prompts(model_dir, 300, heldout=False)
    heldout = varied_prompts(model_dir, 100, heldout=True)

    without_numbers = [
        {"".join(c for c in tokenizer.decode(ids) if not c.isdigit()) for ids in side}
        for side in (known, heldout)
    ]
    assert len({tuple(ids) for ids in known + heldout}) == 400
    assert not without_numbers[0] & without_numbers[1]
    assert known == varied_prompts(model_dir, 300, heldout=False)
