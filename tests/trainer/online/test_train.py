"""A training run may end at any moment and goes on to the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput, Conflict, Corrupt, Draining
from trainer.online.checkpoint import latest_checkpoint, read_drafter, read_state
from trainer.online.step import StepMetrics
from trainer.online.train import OnStep, TrainPaths, TrainRecipe, TrainReport, train_on
from trainer.recipes import smollm2_cpu
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
        paths = TrainPaths(str(qwen_dir), out)
        samples = make_samples(20)
        return train_on(
            samples, recipe=recipe, paths=paths, provenance={"run": "r"}, on_step=on_step
        )

    return start


def count(step: int, metrics: StepMetrics) -> None:
    """Nothing to see."""


def at_step(number: int, act: Callable[[], None]) -> OnStep:
    return lambda step, metrics: act() if step == number else None


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
    assert len(newest(tmp_path / "killed")) == 2
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

    paths = TrainPaths(str(qwen_dir), tmp_path)
    with pytest.raises(Conflict, match="samples"):
        train_on(make_samples(21), recipe=recipe, paths=paths, provenance={}, on_step=count)


def test_ids_of_another_model_are_refused(
    recipe: TrainRecipe, qwen_dir: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    samples = make_samples(20)
    samples[0].ids[-1] = 512

    paths = TrainPaths(str(qwen_dir), tmp_path)
    with pytest.raises(BadInput, match="another model"):
        train_on(samples, recipe=recipe, paths=paths, provenance={}, on_step=count)


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
