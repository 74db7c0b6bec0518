"""Training starts on nothing that failed the gate, and a checkpoint knows what was let pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput, NotEnough
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.store import Store
from tests.trainer.gate.making import RUN, STOP, healthy, sample_of
from tests.trainer.online.growing import GrowingRun, spec_of
from trainer.online.checkpoint import latest_checkpoint, read_state
from trainer.online.recipe import TrainJob
from trainer.online.train import GATE, TrainReport, train
from trainer.recipes import smollm2_cpu
from trainer.tokens.shards import Sample

RECIPE = replace(smollm2_cpu(), num_steps=2, save_every=1)
EMPTY = [sample_of(n, [5 + n, 6, STOP]) for n in range(100, 130)]
Train = Callable[..., TrainReport]


@pytest.fixture
def start(store: Store, qwen_dir: Path, tmp_path: Path) -> Train:
    """`train` on a sealed run with these samples."""

    def start(samples: Sequence[Sample], overrides: Sequence[str] = ()) -> TrainReport:
        if not store.exists(RunKeys(RUN).spec):
            run = GrowingRun(store, 1, replace(spec_of(qwen_dir), run=RUN))
            run.put(0, samples)
            run.seal()
        job = TrainJob(RECIPE, str(qwen_dir), tmp_path / "out", overrides=list(overrides))
        report = train(store, RUN, job=job, on_step=lambda record: None)
        assert report is not None
        return report

    return start


def test_data_that_fail_are_not_trained_on(start: Train, tmp_path: Path) -> None:
    with pytest.raises(NotEnough, match="empty_answers: 30 of 60"):
        start([*healthy(30), *EMPTY])

    assert latest_checkpoint(tmp_path / "out") is None


def test_data_that_pass_are_trained_on_and_the_checkpoint_says_so(start: Train) -> None:
    report = start(healthy(30))

    judged = read_state(Path(report.checkpoint_dir)).provenance[GATE]
    assert (judged["num_samples"], judged["overridden"]) == (30, [])
    assert judged["shares"]["empty_answers"] == 0.0


def test_an_override_is_written_into_the_checkpoint_and_holds_for_the_rest_of_the_run(
    start: Train,
) -> None:
    samples = [*healthy(30), *EMPTY]

    report = start(samples, ["empty_answers"])
    again = start(samples)

    judged = read_state(Path(report.checkpoint_dir)).provenance[GATE]
    assert judged["overridden"] == ["empty_answers"]
    assert judged["shares"]["empty_answers"] == 0.5
    assert again.resumed_from == 2


def test_an_override_that_is_no_rule_is_refused(start: Train) -> None:
    with pytest.raises(BadInput, match="no such rule"):
        start(healthy(30), ["emptiness"])
