"""The comparison of replies, short, and that it can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.lossless import (
    NO_END,
    Case,
    Size,
    compare,
    figures_of,
    main,
    tiny_qwen3,
)
from benchmarks.varied_prompts import varied_prompts
from trainer.drafter.choices import Chooser


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on shared cores take many times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_quick_run_finds_no_reply_changed(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--quick"])

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    figures = {f["figure"]: f["value"] for f in map(json.loads, lines)}
    assert code == 0
    assert figures["lossless.tiny_qwen3_equal_share"] == 1.0
    assert figures["lossless.tiny_qwen3_sampled_equal_share"] == 1.0
    assert figures["lossless.tiny_qwen3_accept_length"] > 1.0


def test_a_reply_that_speculation_changed_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_best(self: Chooser, logits: Tensor, numbers: Tensor, first: Tensor) -> Tensor:
        return logits.topk(2).indices[..., 1]

    monkeypatch.setattr(Chooser, "choose", second_best)  # of speculation alone
    case = Case("wrong", tiny_qwen3(tmp_path), [[11, 12, 13], [200, 7]], NO_END)

    first = next(iter(compare(case, Size(2, 6, num_steps=1))))

    assert first.num_faults == 2
    assert {f.figure: f.value for f in figures_of(first)}["lossless.wrong_equal_share"] == 0.0


@pytest.mark.slow
def test_smollm2_says_with_a_drafter_what_it_says_without(smollm2_dir: Path) -> None:
    prompts = varied_prompts(str(smollm2_dir), 8, heldout=False)
    case = Case("smollm2", smollm2_dir, prompts, NO_END)

    first = next(iter(compare(case, Size(8, 12, num_steps=10, prompts_at_once=8))))

    hits = [hit for reply in first.found.drafted for hit in reply.hits_by_step]
    assert first.num_faults == 0
    assert max(hits) > 0
    assert torch.tensor(hits).float().mean() < first.num_drafts
