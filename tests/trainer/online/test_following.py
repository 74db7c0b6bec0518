"""Training on a run that still grows."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.store import Store
from tests.trainer.online.growing import GrowingRun, renamed, samples_of, spec_of
from trainer.online import holding
from trainer.online.checkpoint import latest_checkpoint
from trainer.online.recipe import TrainJob, TrainRecipe
from trainer.online.train import train
from trainer.online.watching import StepRecord
from trainer.recipes import smollm2_cpu


@pytest.fixture
def recipe() -> TrainRecipe:
    recipe = smollm2_cpu()
    data = replace(recipe.data, buffer_rows=8)
    return replace(recipe, data=data, num_steps=8, save_every=4)


def test_a_trainer_ahead_of_the_run_waits_and_goes_on(
    store: Store,
    qwen_dir: Path,
    recipe: TrainRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.gate.judge.FIRST_SAMPLES", 8)
    run = GrowingRun(store, 4, renamed(spec_of(qwen_dir), "r"))
    run.put(0)
    run.put(1)
    records: list[StepRecord] = []

    def see(record: StepRecord) -> None:
        records.append(record)
        if record.step == 2:  # two shards are two windows of two steps each
            threading.Timer(3.0, lambda: [run.put(2), run.put(3), run.seal()]).start()

    done = train(store, "r", job=TrainJob(recipe, str(qwen_dir), tmp_path / "out"), on_step=see)

    assert done is not None
    assert done.num_steps == 8
    assert records[-1].starved_s > 0.5
    assert sum(r.num_tokens for r in records) == sum(
        len(s.ids) for shard in range(4) for s in samples_of(shard)
    )
    stored = store.get("r/train/out/metrics.jsonl").splitlines()
    assert [orjson.loads(line)["step"] for line in stored] == list(range(1, 9))


def test_epochs_of_a_run_that_grows_have_no_length_and_of_a_sealed_one_they_have(
    store: Store, qwen_dir: Path, recipe: TrainRecipe, tmp_path: Path
) -> None:
    run = GrowingRun(store, 3, renamed(spec_of(qwen_dir), "r"))
    for shard in range(3):
        run.put(shard)
    job = TrainJob(replace(recipe, num_steps=0, num_epochs=2), str(qwen_dir), tmp_path / "out")

    with pytest.raises(BadInput, match="seal its plan"):
        train(store, "r", job=job, on_step=lambda record: None)
    run.seal()
    done = train(store, "r", job=job, on_step=lambda record: None)

    assert done is not None
    assert done.num_steps == 2 * 3 * 8 // recipe.data.batch_size


def test_another_host_goes_on_from_s3_and_a_damaged_shard_is_left_out(
    store: Store, qwen_dir: Path, recipe: TrainRecipe, tmp_path: Path
) -> None:
    run = GrowingRun(store, 3, renamed(spec_of(qwen_dir), "r"))
    for shard in range(3):
        run.put(shard)
    run.damage(1)
    run.seal()

    class Gone(Exception):
        """Stands for a host that vanishes."""

    def vanish(record: StepRecord) -> None:
        if record.step == 6:
            raise Gone

    with pytest.raises(Gone):
        train(
            store,
            "r",
            job=TrainJob(
                recipe, str(qwen_dir), tmp_path / "one", name="n", overrides=["unreadable"]
            ),
            on_step=vanish,
        )
    job = TrainJob(recipe, str(qwen_dir), tmp_path / "two", name="n")
    done = train(store, "r", job=job, on_step=lambda record: None)

    assert done is not None
    assert (done.resumed_from, done.num_steps) == (4, 8)
    lines = (tmp_path / "two" / "metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == list(range(1, 9))


def test_a_second_trainer_of_a_name_is_refused_while_the_first_one_goes_on(
    store: Store,
    qwen_dir: Path,
    recipe: TrainRecipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holding, "BEAT_S", 0.2)
    monkeypatch.setattr(holding, "LOOK_S", 0.05)
    run = GrowingRun(store, 1, renamed(spec_of(qwen_dir), "r"))
    run.put(0)
    run.seal()
    recipe = replace(recipe, num_steps=4)
    second = TrainJob(recipe, str(qwen_dir), tmp_path / "two", name="n")
    refused: list[str] = []

    def see(record: StepRecord) -> None:
        if record.step == 2:
            with pytest.raises(Conflict) as error:
                train(store, "r", job=second, on_step=lambda record: None)
            refused.append(str(error.value))

    job = TrainJob(recipe, str(qwen_dir), tmp_path / "one", name="n")
    done = train(store, "r", job=job, on_step=see)

    assert done is not None and done.num_steps == 4
    assert "r/train/n is being trained by process" in refused[0]
    assert latest_checkpoint(tmp_path / "two") is None


def test_another_tokenizer_or_target_is_refused_before_the_first_step(
    store: Store, qwen_dir: Path, llama_dir: Path, recipe: TrainRecipe, tmp_path: Path
) -> None:
    run = GrowingRun(store, 1, renamed(spec_of(qwen_dir), "r"))
    run.put(0)
    run.seal()

    with pytest.raises(Conflict, match="is not the target of run"):
        train(
            store,
            "r",
            job=TrainJob(recipe, str(llama_dir), tmp_path / "out"),
            on_step=lambda record: None,
        )

    assert latest_checkpoint(tmp_path / "out") is None
