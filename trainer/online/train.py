"""The training run: samples and a frozen target in, checkpoints of a drafter out, on any ranks.

Called by the `train` verb and by demo.py, by each rank alike. Follows a run's shards through the
intake, has a rank work through run.py's steps, keeps itself through keeping.py. Safe to call again
with the same arguments at any time: a finished run trains nothing, a stopped one goes on where it
was, on other ranks or hosts, too; another recipe or other data in the same output folder is
refused, and so is a second trainer of one name. Ctrl-C and SIGTERM end the step in hand, write a
checkpoint, then leave; so do the others where a rank is lost.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from dflash_workers.contract.errors import Draining, Missing, Transient
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, load
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.provenance import MADE_WITH, made_with
from dflash_workers.contract.records import Json
from dflash_workers.contract.store import Store
from dflash_workers.contract.terminal import err
from trainer.online.building import Built, check_same, device_of, first_state
from trainer.online.checkpoint import (
    FOLDER,
    TrainState,
    check_out,
    checkpoint_folders,
    latest_checkpoint,
    read_state,
)
from trainer.online.fingerprint import check_target
from trainer.online.holding import Hold
from trainer.online.intake import Intake, ListIntake, RunSource
from trainer.online.keeping import Keeper, Shelf, measured_length
from trainer.online.measuring import Heldout, StoredHeldout
from trainer.online.prefetch import Prefetch
from trainer.online.ranks import Ranks, join
from trainer.online.recipe import TrainJob
from trainer.online.recording import OnStep, Recorder
from trainer.online.rounds import Desk, Rounds
from trainer.online.stopping import Stop, stop_signals
from trainer.online.stopwatch import Stopwatch
from trainer.online.topology import Topology
from trainer.online.walk import Walk
from trainer.online.watching import METRICS, Starvation, open_watchers
from trainer.online.work import peak_of
from trainer.tokens.shards import Sample

GATE = "gate"  # in a checkpoint's provenance: what the data was judged to be, and the overrides


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What `train` did, this time and before."""

    first_loss: float
    last_loss: float
    num_steps: int
    seconds: float
    checkpoint_dir: str
    resumed_from: int | None  # step; None: this call began at the start
    accept_length: float | None  # the best checkpoint's, on held-out samples; None: not measured


@dataclass(frozen=True, slots=True, eq=False)
class _Data:
    """What is trained on, and how it is spoken of."""

    walk: Walk
    heldout: Iterator[Sample]
    provenance: Callable[[], Json]  # asked at each checkpoint: the gate judges as shards come
    starved_s: Callable[[], float]  # waited for samples so far


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a run has kept so far, and where it keeps more."""

    found: Path | None  # the leader's newest checkpoint
    state: TrainState | None  # its state, on every rank
    shelf: Shelf | None
    on_sent: Callable[[], None]


def train(store: Store, run: str, *, job: TrainJob, on_step: OnStep) -> TrainReport | None:
    """Train on a run's shards, those to come included. Other ranks than the leader return None.

    Raises NotEnough where the data can't teach, Conflict where the output folder belongs to
    another recipe or other data, or the name is another trainer's, LeaseLost where that one took
    this one for dead, Draining after SIGTERM, KeyboardInterrupt after Ctrl-C.
    """
    prefix = RunKeys(run).train(job.stored_name)
    with ExitStack() as held:
        stop = held.enter_context(stop_signals())
        spec = read_spec(store, run)
        check_target(spec, job.model_dir)
        ranks = held.enter_context(_joined(job))
        if ranks.is_leader:
            held.enter_context(Hold(store, prefix, stop.ask))
        shelf = Shelf(store, f"{prefix}{FOLDER}/")
        metrics = f"{prefix}{METRICS}"
        if ranks.is_leader and shelf.fetch_newer(job.out):
            _fetch_metrics(store, metrics, job.out)
        found, state = _found(job.out, ranks)
        judged = dict(state.provenance.get(GATE, {})) if state else {}
        overrides = sorted({*job.overrides, *judged.get("overridden", [])})
        source = RunSource(store, run, job.stored_name, ranks.is_leader, overrides)
        walk = Intake(source, job.recipe.data, job.recipe.seed, on_wait=Starvation(_say).note)
        facts = {"run": run, MADE_WITH: made_with(spec)}
        data = _Data(
            walk,
            StoredHeldout(store, run),
            lambda: facts | {GATE: walk.judged or judged},
            lambda: walk.starved_s,
        )
        kept = _Kept(found, state, shelf, lambda: _send_metrics(store, metrics, job.out))
        return _train(job, ranks, data, kept, on_step, stop)


def train_on(
    samples: Sequence[Sample],
    *,
    job: TrainJob,
    provenance: Json,
    on_step: OnStep,
    heldout: Sequence[Sample] = (),
) -> TrainReport | None:
    """`train` on samples from anywhere; `provenance` is kept beside the weights."""
    with stop_signals() as stop, _joined(job) as ranks:
        found, state = _found(job.out, ranks)
        walk = ListIntake(samples, job.recipe.data, job.recipe.seed)
        facts = {**provenance, "num_samples": len(samples)}
        data = _Data(walk, iter(heldout), lambda: facts, lambda: 0.0)
        return _train(job, ranks, data, _Kept(found, state, None, lambda: None), on_step, stop)


def _train(
    job: TrainJob, ranks: Ranks, data: _Data, kept: _Kept, on_step: OnStep, stop: Stop
) -> TrainReport | None:
    state = kept.state or _told_first_state(job, ranks, data)
    check_same(state, data.walk, job)
    resumed_from = kept.state.step if kept.state else None
    if not state.is_finished:
        with ExitStack() as closing:
            built = Built(job, state, kept.found, ranks, Stopwatch(ranks.device))
            total = _told_total(job, ranks, data.walk)
            batches = _batches(job, ranks, data.walk, state)
            closing.enter_context(batches)
            desk = _desk(job, ranks, data, kept, on_step) if ranks.is_leader else None
            if desk:
                closing.callback(desk.keeper.close)
                closing.callback(desk.recorder.close)
            rounds = Rounds(job, ranks, built, state, batches=batches, stop=stop)
            stop.note_from_now_on()
            _run_until_asked(rounds, ranks, desk, total, stop)
            state = rounds.state
    ranks.parts_in_order = True
    return _report(state, job.out, resumed_from) if ranks.is_leader else None


def _run_until_asked(
    rounds: Rounds, ranks: Ranks, desk: Desk | None, total: int | None, stop: Stop
) -> None:
    """All steps, or those until somebody asks to leave or a rank is lost: then a checkpoint, and
    the way out.
    """
    lost: Draining | Transient | None = None
    try:
        is_asked = rounds.run(desk, total)
    except (Draining, Transient) as error:
        if not (stop.is_asked() or ranks.hurt.is_set()):
            raise
        is_asked, lost = True, error  # not all ranks come to the end of this step
    if not (lost and rounds.needs_all_to_save):
        rounds.save(desk)
    if desk:
        desk.keeper.wait_written()
    if lost and not stop.is_asked():
        raise lost
    if is_asked:
        ranks.parts_in_order = not lost
        _leave(stop, rounds.state.step)


def _leave(stop: Stop, step: int) -> None:
    if stop.error:
        raise stop.error
    if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt
    raise Draining(f"stopped at step {step}; its checkpoint is kept, the same command goes on")


@contextmanager
def _joined(job: TrainJob) -> Iterator[Ranks]:
    topology = Topology(job.launch.num_ranks, job.recipe.topology)
    topology.check_step(job.recipe.num_microbatches)
    check_out(job.out)
    with join(job.launch, topology, device_of(job.launch)) as ranks:
        yield ranks


def _found(out: Path, ranks: Ranks) -> tuple[Path | None, TrainState | None]:
    """The leader's newest checkpoint, and on all ranks its state."""
    found = latest_checkpoint(out) if ranks.is_leader else None
    told = ranks.tell(dump(read_state(found)) if found else b"")
    return found, load(TrainState, told) if told else None


def _told_first_state(job: TrainJob, ranks: Ranks, data: _Data) -> TrainState:
    made = dump(first_state(job, data.walk, data.provenance())) if ranks.is_leader else b""
    return load(TrainState, ranks.tell(made))


def _told_total(job: TrainJob, ranks: Ranks, walk: Walk) -> int | None:
    """Microbatches of all epochs, where they decide how many steps there are."""
    if job.recipe.num_steps:
        return None
    made = str(walk.total_microbatches(job.recipe.num_epochs)) if ranks.is_leader else ""
    return int(ranks.tell(made.encode()))


def _batches(job: TrainJob, ranks: Ranks, walk: Walk, state: TrainState) -> Prefetch:
    first = state.step * job.recipe.num_microbatches
    return Prefetch(
        walk,
        state.place,
        mine=lambda number: number >= first and ranks.is_mine(number),
        device=ranks.device,
    )


def _desk(job: TrainJob, ranks: Ranks, data: _Data, kept: _Kept, on_step: OnStep) -> Desk:
    recipe = job.recipe
    peak = peak_of(ranks.device)
    watchers = open_watchers(job, step=kept.state.step if kept.state else 0)
    return Desk(
        Recorder(watchers, on_step, peak and peak * ranks.topology.num_ranks),
        Keeper(job.out, recipe.num_kept, kept.shelf, kept.on_sent),
        Heldout(data.heldout, recipe.data, recipe.num_evaluated),
        data.provenance,
        data.starved_s,
    )


def _report(state: TrainState, out: Path, resumed_from: int | None) -> TrainReport:
    folders = checkpoint_folders(out)
    lengths = [measured_length(folder) for folder in folders]
    return TrainReport(
        first_loss=state.first_loss,
        last_loss=state.last_loss,
        num_steps=state.step,
        seconds=round(state.seconds, 1),
        checkpoint_dir=str(folders[-1]),
        resumed_from=resumed_from,
        accept_length=max((x for x in lengths if x is not None), default=None),
    )


def _send_metrics(store: Store, key: str, out: Path) -> None:
    store.replace(key, (out / METRICS).read_bytes())


def _fetch_metrics(store: Store, key: str, out: Path) -> None:
    with suppress(Missing):  # a checkpoint may be in S3 a moment before its curves
        (out / METRICS).write_bytes(store.get(key))


def _say(message: str) -> None:
    err.print(message, markup=False, soft_wrap=True)


if __name__ == "__main__":  # torchrun starts a module: the verb, by the command's own name
    (command,) = entry_points(group="console_scripts", name="dflash-fleet")
    # torchrun takes --run for one of its own, unless it stands behind a "--", which it hands on.
    sys.argv[1:] = ["train", *sys.argv[1 + (sys.argv[1:2] == ["--"]) :]]
    command.load()()
