"""What this machine shall run: every check made, the model near, each lane's command lines known.

From the options and the run to -> machine, which starts the lanes. The order is that of a person's
patience: what takes milliseconds (Redis, S3, the run, the engine's version) is asked before the
model is moved, and the engines' minutes come last. What it raises names what to do.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import orjson
import psutil

from dflash_workers.contract.errors import BadInput, Corrupt
from dflash_workers.contract.keys import DRAFTERS
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.provenance import PROVENANCE, check_made_with
from dflash_workers.contract.queues import check_redis, open_redis
from dflash_workers.contract.records import Json, RunSpec
from dflash_workers.contract.serving import NONE
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.node.checks import (
    check_gpus,
    check_ports,
    check_room,
    interpreters,
    tell_disks,
)
from dflash_workers.node.folder import NodeFolder
from dflash_workers.node.gpus import Gpu, find_gpus
from dflash_workers.node.installed import read_versions
from dflash_workers.node.lane import LaneConfig
from dflash_workers.node.presets import (
    DFLASH,
    DIALECT_OF,
    ENGINES,
    MTP,
    SGLANG,
    THROUGHPUT,
    Wish,
    engine_flags,
    split_args,
)
from dflash_workers.node.staged import AUTO, Shelf, stage_model
from dflash_workers.opening import default_slot
from dflash_workers.server import EngineConfig

log = logging.getLogger(__name__)

BASE_PORT = 30000
METRICS_STEP = 10  # between two workers' ports: between them are those of the fleet's other parts
CPU_TOKENS = 32768  # KV cache slots of an engine on a CPU
WORKER_WAIT_S = 120.0  # for an engine that has answered already


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What a person may choose; Redis, S3, the run and the model stand in the settings."""

    engine_python: Path
    gpus: tuple[str, ...] = ()  # indices or UUIDs; empty: all
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES
    is_cpu: bool = False
    num_cpu_engines: int = 1
    engine: str = SGLANG
    presets: tuple[str, ...] = (THROUGHPUT,)
    drafter: str = ""  # a folder, s3:// or hf:
    may_differ: bool = False  # the drafter's target from the run's
    engine_args: tuple[str, ...] = ()
    worker_args: tuple[str, ...] = ()
    metrics_at: tuple[str, int] | None = None  # host and the first worker's port
    stage: str = AUTO
    base_port: int = BASE_PORT
    grace_s: float = 0.0
    idle_exit_s: float = 0.0


def lay_out(options: NodeOptions, settings: Settings, folder: NodeFolder) -> list[LaneConfig]:
    """Check everything and stage the model; raise what is missing."""
    if options.engine not in ENGINES:
        raise BadInput(f"no engine {options.engine!r}: use {' or '.join(ENGINES)}")
    spec = check_services(settings)
    log.info("run %s: target %s", spec.run, spec.target.name)
    versions = read_versions(options.engine_python)
    version = versions.require(options.engine)
    gpus = [] if options.is_cpu else find_gpus(options.gpus, options.visible_gpus)
    num_lanes = options.num_cpu_engines if options.is_cpu else len(gpus)
    check_ports("127.0.0.1", [options.base_port + number for number in range(num_lanes)])
    check_room(folder.path)
    tell_disks({**interpreters(options.engine_python), "this node's folder": folder.logs})
    shelf = Shelf(folder.models, where=options.stage)
    model_dir = _stage(settings.model or _usual_place(settings, spec), shelf, settings)
    config = _check_config(model_dir, spec)
    check_gpus(gpus, versions, sum(p.stat().st_size for p in model_dir.glob("*.safetensors")))
    drafter = _stage(options.drafter, shelf, settings) if options.drafter else None
    if drafter and not options.may_differ:
        check_made_with(_provenance(drafter), spec, options.drafter)
    wish = Wish(
        engine=options.engine,
        version=version,
        presets=options.presets,
        max_in_flight=settings.max_in_flight,
        model_config=config,
        drafter=drafter,
        is_cpu=options.is_cpu,
        engine_args=options.engine_args,
    )
    flags = engine_flags(wish)
    log.info("%s %s: %s", options.engine, version, " ".join(flags))
    settings = replace(settings, model=str(model_dir), engine_dialect=DIALECT_OF[options.engine])
    lanes = [
        _lane(number, gpus[number] if gpus else None, flags, options, settings, folder)
        for number in range(num_lanes)
    ]
    models = (model_dir, *([drafter] if drafter else []))
    if drafter is not None or {MTP, DFLASH} & set(options.presets):
        return [replace(lane, models=models) for lane in lanes]
    drafters = partial(_stage_drafter, shelf=shelf, settings=settings)
    return [
        replace(lane, models=models, engine_with=partial(_engine_with, lane.engine, wish, drafters))
        for lane in lanes
    ]


def _engine_with(
    engine: EngineConfig, wish: Wish, stage: Callable[[str], Path], drafter: str
) -> EngineConfig:
    """The same engine with a drafter of the fleet's, or with none."""
    if drafter == NONE:
        return engine
    wish = replace(wish, presets=(*wish.presets, DFLASH), drafter=stage(drafter))
    return replace(engine, extra_args=tuple(engine_flags(wish)))


def _stage_drafter(drafter: str, *, shelf: Shelf, settings: Settings) -> Path:
    return stage_model(open_store(settings).url(f"{DRAFTERS}{drafter}"), shelf, settings)


def check_services(settings: Settings) -> RunSpec:
    """The run, as S3 has it. Raises where Redis, S3 or the run is not there."""
    with open_redis(settings, timeout_s=10) as client:
        check_redis(client, settings)
    store = open_store(settings)
    store.check()
    return read_spec(store, settings.require_run())


def _usual_place(settings: Settings, spec: RunSpec) -> str:
    """Where a run's target lies unless somebody says otherwise."""
    store: Store = open_store(settings)
    return store.url(f"models/{spec.target.name}")


def _stage(model: str, shelf: Shelf, settings: Settings) -> Path:
    folder = stage_model(model, shelf, settings)
    tell_disks({"model": folder})
    return folder


def _check_config(model_dir: Path, spec: RunSpec) -> Json:
    """The model's config.json. Raises BadInput where the run is of another: seconds, not minutes,
    before a worker would find out."""
    body = (model_dir / "config.json").read_bytes()
    if hashlib.sha256(body).hexdigest() != spec.target.config_sha256:
        raise BadInput(
            f"{model_dir}: its config.json is not that of {spec.target.name}, which run "
            f"{spec.run!r} is made with: pass the --model that the run was planned with"
        )
    try:
        config: Json = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{model_dir / 'config.json'}: not JSON: {error}") from error
    return config


def _metrics_flags(options: NodeOptions, number: int) -> list[str]:
    if options.metrics_at is None:
        return []
    host, port = options.metrics_at
    return ["--metrics-host", host, "--metrics-port", f"{port + METRICS_STEP * number}"]


def _provenance(drafter: Path) -> Json:
    """What its folder says of its making. Raises Corrupt."""
    path = drafter / PROVENANCE
    try:
        found: Json = orjson.loads(path.read_bytes()) if path.is_file() else {}
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{path}: not JSON: {error}") from error
    return found


def _lane(
    number: int,
    gpu: Gpu | None,
    flags: list[str],
    options: NodeOptions,
    settings: Settings,
    folder: NodeFolder,
) -> LaneConfig:
    engine = EngineConfig(
        python=options.engine_python,
        model_dir=Path(settings.model),
        port=options.base_port + number,
        cpu=options.is_cpu,
        num_threads=max((psutil.cpu_count() or 1) // options.num_cpu_engines, 1),
        max_running_requests=settings.max_in_flight,
        max_total_tokens=CPU_TOKENS if options.is_cpu else 0,
        dtype="float32" if options.is_cpu else "auto",
        extra_args=tuple(flags),
        kind=options.engine,
        gpu=gpu.uuid if gpu else "",
    )
    slot = f"{settings.slot}-{number}" if settings.slot else default_slot(engine.url)
    own = replace(settings, engine_url=engine.url, slot=slot)
    return LaneConfig(
        number=number,
        slot=slot,
        engine=engine,
        worker_argv=(
            *(sys.executable, "-m", "fleet", "worker", "--wait-s", f"{WORKER_WAIT_S:g}"),
            *("--grace-s", f"{options.grace_s:g}", "--idle-exit-s", f"{options.idle_exit_s:g}"),
            *_metrics_flags(options, number),
            *split_args(options.worker_args),
        ),
        worker_environ=dict(os.environ) | own.environment(),
        logs=folder.logs,
        grace_s=options.grace_s,
        may_idle_out=options.idle_exit_s > 0,
        check_services=partial(check_services, settings),
    )
