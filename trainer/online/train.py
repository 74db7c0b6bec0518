"""The training run: samples and a frozen target in, checkpoints of a drafter out.

Called by the `train` verb and by demo.py. Has the run judged by gate/ before the first step, reads
shards through batches.py, updates through step.py, keeps itself in checkpoint.py. Safe to call
again with the same arguments at any time: a finished run trains nothing, a stopped one goes on
where it was; another recipe or other data in the same output folder is refused. Ctrl-C and SIGTERM
end the step in hand, write a checkpoint, then leave.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType

import torch

from dflash_workers.contract.errors import BadInput, Conflict, Draining
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import Json, RunSpec, encode
from dflash_workers.contract.store import Store
from trainer.drafter.config import DrafterShape
from trainer.drafter.fitting import drafter_config
from trainer.drafter.loss import LossRecipe
from trainer.drafter.start import Start, untrained_drafter
from trainer.gate.judge import Gate
from trainer.online.batches import Corpus, DataRecipe, MicroBatch, Place, read_samples
from trainer.online.checkpoint import (
    TrainState,
    check_out,
    latest_checkpoint,
    read_state,
    restore,
    save_checkpoint,
)
from trainer.online.features import Features
from trainer.online.step import OptimizerRecipe, StepMetrics, Stepper
from trainer.online.target import check_target, load_target, target_config
from trainer.tokens.shards import Sample


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """Everything that decides the weights, beside data, target and machine."""

    drafter: DrafterShape
    data: DataRecipe
    loss: LossRecipe
    optimizer: OptimizerRecipe
    num_steps: int
    num_microbatches: int = 1  # of one step: more where the memory can't take a larger one
    save_every: int = 200  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.num_steps, self.num_microbatches, self.save_every) < 1:
            raise BadInput("num_steps, num_microbatches and save_every must be at least 1")


@dataclass(frozen=True, slots=True)
class TrainPaths:
    """Where a run reads its target and keeps its checkpoints."""

    model_dir: str
    out: Path


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What `train` did, this time and before."""

    first_loss: float
    last_loss: float
    num_steps: int
    seconds: float
    checkpoint_dir: str
    resumed_from: int | None  # step; None: this call began at the start


GATE = "gate"  # in a checkpoint's provenance: what the data was judged to be, and the overrides

OnStep = Callable[[int, StepMetrics], None]  # steps done, what the last one saw


def train(
    store: Store,
    run: str,
    *,
    recipe: TrainRecipe,
    paths: TrainPaths,
    on_step: OnStep,
    overrides: Collection[str] = (),
) -> TrainReport:
    """Train on the shards that a run has now. `overrides`: rules of the gate that may fail.

    Raises NotEnough where the data can't teach, Conflict where the output folder belongs to
    another recipe or other data, Draining after SIGTERM, KeyboardInterrupt after Ctrl-C.
    """
    check_target(load(RunSpec, store.get(RunKeys(run).spec)), paths.model_dir)
    provenance = {"run": run, GATE: _judged(store, run, paths.out, overrides)}
    samples = read_samples(store, run, heldout=False)
    return train_on(samples, recipe=recipe, paths=paths, provenance=provenance, on_step=on_step)


def train_on(
    samples: list[Sample],
    *,
    recipe: TrainRecipe,
    paths: TrainPaths,
    provenance: Json,
    on_step: OnStep,
) -> TrainReport:
    """`train` on samples from anywhere; `provenance` is kept beside the weights."""
    check_out(paths.out)
    corpus = Corpus(samples, recipe.data, seed=recipe.seed)
    found = latest_checkpoint(paths.out)
    state = read_state(found) if found else _first_state(corpus, recipe, paths, provenance)
    _check_same(state, corpus, recipe, paths.out)
    resumed_from = state.step if found else None
    if found and state.is_finished:
        return _report(state, found, resumed_from)
    stepper = _build(state, recipe, paths.model_dir)
    if found:
        restore(found, stepper.drafter, stepper.optimizer)
    batches = corpus.from_place(state.place)
    with _stop_signals() as stop:
        while not state.is_finished:
            state = _train_until_save(stepper, batches, state, recipe, on_step, stop)
            found = save_checkpoint(paths.out, state, stepper.drafter, stepper.optimizer)
            if stop.signal:
                _leave(stop.signal, state.step, found)
    assert found is not None  # a run has at least one step
    return _report(state, found, resumed_from)


def _judged(store: Store, run: str, out: Path, overrides: Collection[str]) -> Json:
    """What the gate found; of a run that goes on, on the same data, what it found at the start."""
    found = latest_checkpoint(out)
    if found and (judged := read_state(found).provenance.get(GATE)):
        return dict(judged)
    report = Gate(store, run, overrides=overrides).report()
    report.check()
    return report.for_checkpoint()


class _Stop:
    """The signal that asked to leave, 0 as long as none did."""

    signal = 0


def _train_until_save(
    stepper: Stepper,
    batches: Iterator[MicroBatch],
    state: TrainState,
    recipe: TrainRecipe,
    on_step: OnStep,
    stop: _Stop,
) -> TrainState:
    """At least one step, up to the next one that asks for a checkpoint."""
    device = stepper.drafter.fc.weight.device
    began = time.monotonic()
    for step in range(state.step, state.num_steps):
        microbatches = [b.to(device) for b in itertools.islice(batches, recipe.num_microbatches)]
        metrics = stepper.step(microbatches, at=step, num_steps=state.num_steps)
        state = replace(
            state,
            step=step + 1,
            place=microbatches[-1].after,
            first_loss=metrics.loss if step == 0 else state.first_loss,
            last_loss=metrics.loss,
        )
        on_step(state.step, metrics)
        if stop.signal or state.step % recipe.save_every == 0:
            break
    return replace(state, seconds=state.seconds + time.monotonic() - began)


def _first_state(
    corpus: Corpus, recipe: TrainRecipe, paths: TrainPaths, provenance: Json
) -> TrainState:
    target = target_config(paths.model_dir)
    config_file = Path(paths.model_dir) / "config.json"
    facts = {
        "target": Path(paths.model_dir).resolve().name,
        "target_config_sha256": hashlib.sha256(config_file.read_bytes()).hexdigest(),
        "num_samples": len(corpus.samples),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("dflash-fleet", "torch", "transformers")},
    }
    return TrainState(
        step=0,
        num_steps=recipe.num_steps,
        place=Place(),
        config=drafter_config(target, recipe.drafter, paths.model_dir),
        recipe=encode(recipe),
        corpus_digest=corpus.digest(),
        first_loss=0.0,
        last_loss=0.0,
        seconds=0.0,
        provenance={**provenance, **facts},
    )


def _check_same(state: TrainState, corpus: Corpus, recipe: TrainRecipe, out: Path) -> None:
    if state.recipe != encode(recipe):
        raise Conflict(f"{out}: holds a run of another recipe: choose another output folder")
    if state.corpus_digest != corpus.digest():
        raise Conflict(f"{out}: holds a run on other samples: choose another output folder")
    if corpus.largest_id() >= state.config.vocab_size:
        raise BadInput(
            f"the samples hold id {corpus.largest_id()}, the target knows "
            f"{state.config.vocab_size}: they are another model's"
        )


def _build(state: TrainState, recipe: TrainRecipe, model_dir: str) -> Stepper:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # bf16 is what the target is served in; a CPU computes it many times slower than fp32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(model_dir, state.config.target_layer_ids, dtype=dtype, device=device)
    start = Start(recipe.seed, recipe.drafter.copy_target_layers)
    drafter = untrained_drafter(state.config, start, target.layers, target.norm)
    if not recipe.loss.needs_teacher:
        target.cut()
    features = Features(target, recipe.data.keep_features_mb)
    return Stepper(
        drafter.to(device), target, features, loss=recipe.loss, optimizer=recipe.optimizer
    )


@contextmanager
def _stop_signals() -> Iterator[_Stop]:
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python takes signals in the main thread only: whoever owns it decides
        return

    def note(number: int, _frame: FrameType | None) -> None:
        stop.signal = number

    former = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _leave(number: int, step: int, checkpoint: Path) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Draining(f"stopped at step {step}; {checkpoint} is kept, the same command goes on")


def _report(state: TrainState, checkpoint: Path, resumed_from: int | None) -> TrainReport:
    return TrainReport(
        state.first_loss,
        state.last_loss,
        state.step,
        round(state.seconds, 1),
        str(checkpoint),
        resumed_from,
    )
