"""What a person and a machine see of a training run: a line per step, curves, gauges.

Held by train.py's leader. Every step is a line of `<out>/metrics.jsonl`, which goes to S3 with the
checkpoints and is what the run's report plots; TensorBoard where it is installed, Prometheus where
a port is given, W&B or trackio where one is named. Invariant: after a stop the lines go on where
the checkpoint was: no step stands there twice.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.contract.metrics import COUNTER, TRAINER, Metric
from dflash_workers.contract.records import encode
from trainer.online.recipe import TrainJob

METRICS = "metrics.jsonl"
SAID_EVERY_S = 60.0
TRACKERS = ("wandb", "trackio")  # of one interface


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A line of metrics.jsonl."""

    at: float  # seconds since the epoch
    step: int  # steps done
    num_steps: int
    loss: float  # nats
    accept_length: float  # expected: tokens per verify step that the step's blocks would give
    measured_accept_length: float | None  # on held-out samples; None: not measured at this step
    accuracy_by_place: list[float]
    entropy: float  # nats
    gradient_norm: float
    learning_rate: float
    num_tokens: int  # of the step, without padding
    tokens_per_s: float
    mfu: float | None  # target and drafter, of all drafters' chips; None: unknown chip
    seconds: dict[str, float]  # of the step by phase, of the leader's rank
    starved_s: float  # waited for shards since the process began
    starving: str  # who waits for whom: see `starving_side`

    def scalars(self) -> dict[str, float]:
        """Every number that has one name."""
        names = ("loss", "accept_length", "measured_accept_length", "entropy", "gradient_norm")
        more = ("learning_rate", "tokens_per_s", "mfu", "starved_s")
        found = {n: getattr(self, n) for n in names + more}
        places = {f"accuracy/{k + 1}": a for k, a in enumerate(self.accuracy_by_place)}
        phases = {f"seconds/{name}": s for name, s in self.seconds.items()}
        return {n: float(v) for n, v in (found | places | phases).items() if v is not None}


class Watcher(Protocol):
    """Somewhere that records go."""

    def see(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def starving_side(seconds: dict[str, float], sender_wait_s: float) -> str:
    """Who waits most: "data" (the drafter for microbatches), "drafter" (for features), "target"
    (for a drafter to take them); "" where nobody waits for a tenth of a step.
    """
    waits = {
        "data": seconds["data"],
        "drafter": seconds["transfer"],
        "target": sender_wait_s,
    }
    side = max(waits, key=lambda name: waits[name])
    return side if waits[side] > 0.1 * sum(seconds.values()) else ""


def open_watchers(job: TrainJob, *, step: int) -> list[Watcher]:
    """All that were asked for or are there. `step`: steps done when training goes on."""
    watchers: list[Watcher] = [Lines(job.out, step)]
    if importlib.util.find_spec("tensorboard"):
        watchers.append(Board(job.out / "tensorboard", step))
    if job.metrics_port:
        watchers.append(Gauges(job.metrics_port))
    if job.tracker:
        watchers.append(Tracker(job))
    return watchers


class Lines:
    """metrics.jsonl, a line per step."""

    def __init__(self, out: Path, step: int) -> None:
        path = out / METRICS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = b"".join(line for line in lines if _step_of(line) <= step)
        path.write_bytes(kept)
        self._file = path.open("ab", buffering=0)

    def see(self, record: StepRecord) -> None:
        self._file.write(orjson.dumps(dataclasses.asdict(record)) + b"\n")

    def close(self) -> None:
        self._file.close()


class Board:
    """TensorBoard's event files."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def see(self, record: StepRecord) -> None:
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class Gauges:
    """Prometheus, on loopback."""

    def __init__(self, port: int) -> None:
        """Raises Missing without its client, BadInput where the port is taken."""
        try:
            import prometheus_client as prometheus  # optional
        except ImportError as error:
            raise Missing("--metrics-port: pip install prometheus_client") from error
        self._registry = prometheus.CollectorRegistry()
        kinds = {COUNTER: prometheus.Counter}
        self._known: dict[str, tuple[Metric, Any]] = {
            metric.name: (
                metric,
                kinds.get(metric.kind, prometheus.Gauge)(
                    metric.name, metric.meaning, metric.labels, registry=self._registry
                ),
            )
            for metric in TRAINER
        }
        try:
            self._server, self._thread = prometheus.start_http_server(
                port, addr="127.0.0.1", registry=self._registry
            )
        except OSError as error:
            raise BadInput(f"--metrics-port {port}: {error.strerror}") from error
        self._starved_s = 0.0

    def see(self, record: StepRecord) -> None:
        self._set("step", record.step)
        for name in ("loss", "accept_length", "measured_accept_length", "mfu"):
            self._set(name, getattr(record, name))
        self._set("tokens_per_second", record.tokens_per_s)
        self._set("tokens_total", record.num_tokens)
        self._set("starved_seconds_total", record.starved_s - self._starved_s)
        self._starved_s = record.starved_s
        for phase, seconds in record.seconds.items():
            self._set("phase_seconds", seconds, phase)
        for place, accuracy in enumerate(record.accuracy_by_place, 1):
            self._set("draft_accuracy", accuracy, str(place))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, what: str, value: float | None, *labels: str) -> None:
        name = f"dflash_trainer_{what}"
        if name not in self._known or value is None:
            return
        metric, found = self._known[name]
        cell = found.labels(*labels) if labels else found
        cell.inc(value) if metric.kind == COUNTER else cell.set(value)


class Tracker:
    """W&B or trackio, which has its interface; where it sends to is its own settings' affair."""

    def __init__(self, job: TrainJob) -> None:
        name = job.tracker
        if name not in TRACKERS:
            raise BadInput(f"--tracker {name}: one of {', '.join(TRACKERS)}")
        if not importlib.util.find_spec(name):
            raise Missing(f"--tracker {name}: not installed: pip install {name}")
        self._module = importlib.import_module(name)
        self._module.init(project="dflash-fleet", name=job.stored_name, config=encode(job.recipe))

    def see(self, record: StepRecord) -> None:
        self._module.log(record.scalars(), step=record.step)

    def close(self) -> None:
        self._module.finish()


class Starvation:
    """What the intake waits for, said now and then; used from its thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at = -SAID_EVERY_S

    def note(self, waited_s: float, message: str) -> None:
        """Called again and again during a wait, which has taken `waited_s` so far."""
        if time.monotonic() - self._said_at >= SAID_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"training waits for data ({waited_s:.0f} s): {message}")


def _step_of(line: bytes) -> int:
    try:
        step: int = orjson.loads(line)["step"]
    except (orjson.JSONDecodeError, KeyError):
        return 1 << 62  # half a line, of a process that was killed
    return step
