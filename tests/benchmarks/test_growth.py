"""Planted runs are real ones, and the figures are what they say."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.growth import Cost, Found, call, figures_of
from benchmarks.planting import BATCH_SIZE, commit_all, plant
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.audit import audit
from tests.tiny_model import make_tiny_model


def cost(wall_s: float = 1.0, cpu_s: float = 1.0) -> Cost:
    return Cost(wall_s, cpu_s, peak_mb=100.0, report={})


@pytest.mark.slow
def test_a_planted_run_is_whole_and_a_verb_says_so_in_a_process_of_its_own(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    own = dataclasses.replace(settings, model=str(make_tiny_model(tmp_path)))

    plant(own, 2)
    waiting = audit(store, own.run)
    commit_all(own)
    looked = call(own, "status", "--json")

    assert waiting.num_waiting == waiting.num_prompts == 2 * BATCH_SIZE
    found = audit(store, own.run)
    assert found.is_whole
    assert found.num_data_objects == 2
    said: Json = looked.report
    assert (said["completed"], said["num_pending"]) == (2 * BATCH_SIZE, 2)
    assert looked.wall_s > 0 and looked.cpu_s > 0 and looked.peak_mb > 10


@pytest.mark.slow
def test_a_verb_that_fails_is_no_measurement(settings: Settings) -> None:
    with pytest.raises(RuntimeError, match="ended with 1"):
        call(settings, "status")


def test_the_slower_look_counts_and_a_ratio_leaves_out_the_start() -> None:
    looks = {verb: cost() for verb in ("status", "status_uncounted", "reconcile", "runs", "gc")}
    small = Found(10, cost(cpu_s=1.64), {}, (0.0, 0.0))
    large = Found(100, cost(cpu_s=8.04), looks | {"status_queued": cost(wall_s=3.0)}, (5.0, 0.5))

    found = figures_of([small, large], cost(), cost())

    figures = {figure.figure: figure for figure in found}
    assert figures["growth.status_s"].value == 3.0
    assert figures["growth.status_s"].is_met is False
    assert figures["growth.audit_ms_per_prompt"].value == pytest.approx(1.1)
    assert figures["growth.audit_ms_per_prompt_ratio"].value == pytest.approx(1.1)
    assert figures["growth.progress_first_s"].value == 5.0
    assert figures["growth.batches"].value == 100
