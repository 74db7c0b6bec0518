"""A training run may end at any moment and goes on to the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
import torch

from dflash_workers.contract.errors import BadInput, Conflict, Corrupt, Draining, Permanent
from trainer.drafter.export import export_drafter
from trainer.online.checkpoint import latest_checkpoint, read_drafter, read_state
from trainer.online.recipe import TrainJob, TrainRecipe
from trainer.online.recording import OnStep
from trainer.online.train import TrainReport, train_on
from trainer.online.watching import StepRecord
from trainer.recipes import named_recipe, smollm2_cpu
from trainer.tokens.shards import Sample

MakeSamples = Callable[..., list[Sample]]


class Killed(Exception):
    """Stands for an end without warning."""


@pytest.fixture
def recipe() -> TrainRecipe:
    return replace(smollm2_cpu(), num_steps=6, save_every=3)


@pytest.fixture
def run(
    qwen_dir: Path, recipe: TrainRecipe, make_samples: MakeSamples
) -> Callable[..., TrainReport]:
    def start(out: Path, on_step: OnStep, recipe: TrainRecipe = recipe) -> TrainReport:
        job = TrainJob(recipe, str(qwen_dir), out)
        report = train_on(make_samples(20), job=job, provenance={"run": "r"}, on_step=on_step)
        assert report is not None
        return report

    return start


def count(record: StepRecord) -> None:
    """Nothing to see."""


def at_step(number: int, act: Callable[[], None]) -> OnStep:
    return lambda record: act() if record.step == number else None


def kill() -> None:
    raise Killed


def newest(out: Path) -> dict[str, bytes]:
    folder = latest_checkpoint(out)
    assert folder is not None
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".safetensors"}


def test_a_killed_run_goes_on_from_its_checkpoint_to_the_same_bits(
    run: Callable[..., TrainReport], tmp_path: Path
) -> None:
    unbroken = run(tmp_path / "unbroken", count)
    with pytest.raises(Killed):
        run(tmp_path / "killed", at_step(5, kill))

    report = run(tmp_path / "killed", count)

    assert report.resumed_from == 3
    assert (report.num_steps, report.last_loss) == (6, unbroken.last_loss)
    assert report.first_loss == unbroken.first_loss
    assert len(newest(tmp_path / "killed")) == 3
    assert newest(tmp_path / "killed") == newest(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Draining), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_the_step_in_hand_and_leaves_a_checkpoint(
    run: Callable[..., TrainReport],
    tmp_path: Path,
    number: signal.Signals,
    error: type[BaseException],
) -> None:
    unbroken = run(tmp_path / "unbroken", count)

    with pytest.raises(error):
        run(tmp_path / "out", at_step(2, lambda: os.kill(os.getpid(), number)))
    report = run(tmp_path / "out", count)

    assert report.resumed_from == 2
    assert newest(tmp_path / "out") == newest(tmp_path / "unbroken")
    assert unbroken.resumed_from is None


def test_a_finished_run_trains_nothing(run: Callable[..., TrainReport], tmp_path: Path) -> None:
    first = run(tmp_path, count)

    second = run(tmp_path, at_step(1, kill))

    assert second == replace(first, resumed_from=6)


def test_the_last_two_checkpoints_are_kept(
    run: Callable[..., TrainReport], recipe: TrainRecipe, tmp_path: Path
) -> None:
    run(tmp_path, count, replace(recipe, save_every=1))

    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())

    assert names == ["step-00000005", "step-00000006"]


def test_another_recipe_in_the_same_folder_is_refused(
    run: Callable[..., TrainReport], recipe: TrainRecipe, tmp_path: Path
) -> None:
    run(tmp_path, count)

    with pytest.raises(Conflict, match="recipe"):
        run(tmp_path, count, replace(recipe, num_steps=7))


def test_other_samples_in_the_same_folder_are_refused(
    run: Callable[..., TrainReport],
    recipe: TrainRecipe,
    qwen_dir: Path,
    make_samples: MakeSamples,
    tmp_path: Path,
) -> None:
    run(tmp_path, count)

    job = TrainJob(recipe, str(qwen_dir), tmp_path)
    with pytest.raises(Conflict, match="samples"):
        train_on(make_samples(21), job=job, provenance={}, on_step=count)


def test_ids_of_another_model_are_refused(
    recipe: TrainRecipe, qwen_dir: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    samples = make_samples(20)
    samples[0].ids[-1] = 512

    job = TrainJob(recipe, str(qwen_dir), tmp_path)
    with pytest.raises(BadInput, match="another model"):
        train_on(samples, job=job, provenance={}, on_step=count)


def test_a_checkpoint_says_where_it_comes_from(
    run: Callable[..., TrainReport], tmp_path: Path
) -> None:
    report = run(tmp_path, count)

    state = read_state(Path(report.checkpoint_dir))

    assert state.is_finished
    assert state.provenance["run"] == "r"
    assert state.provenance["num_samples"] == 20
    assert state.recipe["num_steps"] == 6


def test_a_damaged_checkpoint_is_corrupt_and_says_what_to_do(
    run: Callable[..., TrainReport], tmp_path: Path
) -> None:
    folder = Path(run(tmp_path, count).checkpoint_dir)
    body = (folder / "drafter.safetensors").read_bytes()
    (folder / "drafter.safetensors").write_bytes(body[:100])

    with pytest.raises(Corrupt, match="delete this checkpoint"):
        read_drafter(folder)


def test_a_step_that_is_not_finite_changes_nothing_and_names_its_samples(
    run: Callable[..., TrainReport], recipe: TrainRecipe, tmp_path: Path
) -> None:
    hot = replace(recipe.optimizer, learning_rate=1e30)

    with pytest.raises(Permanent, match="not-finite-step") as error:
        run(tmp_path, count, replace(recipe, optimizer=hot, num_steps=50, save_every=1))

    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    assert all(torch.isfinite(p).all() for p in read_drafter(folder).parameters())
    (named,) = tmp_path.glob("not-finite-step-*.json")
    assert str(named) in str(error.value)
    facts = orjson.loads(named.read_bytes())
    assert facts["step"] == read_state(folder).step + 1
    keys = [key for keys in facts["samples"].values() for key in keys]
    assert len(keys) == recipe.data.batch_size * recipe.num_microbatches


def test_curves_have_each_step_once_also_after_a_kill(
    run: Callable[..., TrainReport], tmp_path: Path
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, at_step(5, kill))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "lo')  # what a killed process leaves

    run(tmp_path, count)

    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_a_published_drafter_is_gone_on_with(
    run: Callable[..., TrainReport],
    recipe: TrainRecipe,
    qwen_dir: Path,
    make_samples: MakeSamples,
    tmp_path: Path,
) -> None:
    first = run(tmp_path / "first", count)
    published = export_drafter(
        read_drafter(Path(first.checkpoint_dir)),
        tmp_path / "published",
        dtype="float32",
        provenance={},
    )
    seen: list[float] = []

    job = TrainJob(recipe, str(qwen_dir), tmp_path / "second", start_from=published)
    train_on(make_samples(20), job=job, provenance={}, on_step=lambda r: seen.append(r.loss))

    assert seen[0] < first.first_loss
    folder = latest_checkpoint(tmp_path / "second")
    assert folder is not None
    assert read_state(folder).provenance["start_from"] == "published"


@pytest.mark.slow
def test_a_few_samples_are_learned_by_heart(
    qwen_dir: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    changes = ["num_steps=350", "data.num_anchors=16", "data.batch_size=8", "save_every=350"]
    changes += ["drafter.num_layers=2", "optimizer.learning_rate=5e-3"]
    job = TrainJob(named_recipe("smollm2_cpu", changes), str(qwen_dir), tmp_path)
    seen: list[StepRecord] = []

    train_on(make_samples(32), job=job, provenance={}, on_step=seen.append)

    accuracy = [min(record.accuracy_by_place) for record in seen[-20:]]
    assert sum(accuracy) / len(accuracy) > 0.95
