"""The workers' verb of `dflash-fleet`: worker.

Mounted by fleet.py. A verb's parameters are its flags, however many. Flags win over the
environment (DFLASH_*), that over dflash.toml.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

import celeryconfig
from dflash_workers.answering import MAX_TOOL_ROUNDS
from dflash_workers.contract.errors import BadUsage
from dflash_workers.contract.settings import ENGINE_DIALECTS, Settings, load_settings
from dflash_workers.engine_load import EngineLoad
from dflash_workers.exposition import serve
from dflash_workers.logs import set_up_logs
from dflash_workers.opening import NOTE_EVERY, Options
from dflash_workers.vitals import Limits
from dflash_workers.worker import Worker
from dflash_workers.worker_metrics import WorkerMetrics

app = typer.Typer()

RunOption = Annotated[str, typer.Option("--run", help="Name of the run.", show_default=False)]

NODE_NAME = "{slot}@fleet"  # of Celery and so in Flower: no host, of which spot nodes have many

_ENVIRONMENT = """Redis and S3 are named by the environment, or in dflash.toml in lower case and
without DFLASH_: DFLASH_REDIS_URL, DFLASH_REDIS_PREFIX, DFLASH_S3_ENDPOINT, DFLASH_S3_BUCKET,
DFLASH_S3_PREFIX, DFLASH_S3_REGION, DFLASH_S3_ACCESS_KEY, DFLASH_S3_SECRET_KEY. What can differ from
one worker to the next can be set there as well: --engine-url is DFLASH_ENGINE_URL, and so are
--run, --model, --engine-dialect, --max-in-flight, --slot and the four --spot flags. Flags win."""


@app.callback()
def verbs() -> None:
    """The workers' verb."""


@app.command(epilog=_ENVIRONMENT)
def worker(
    run: RunOption = "",
    model: Annotated[str, typer.Option(help="Folder of the target model.")] = "",
    queue: Annotated[
        str, typer.Option(help="`tokenize`: make shards of commits, on CPUs, without an engine.")
    ] = "",
    engine_url: Annotated[str, typer.Option(help="The SGLang server.", show_default=False)] = "",
    engine_dialect: Annotated[
        str,
        typer.Option(help=f"How it is spoken to: {' or '.join(ENGINE_DIALECTS)}. Default: sglang."),
    ] = "",
    max_in_flight: Annotated[
        int | None, typer.Option(help="Requests running in the engine at once.", min=1)
    ] = None,
    slot: Annotated[str, typer.Option(help="A stable name for this worker.")] = "",
    batches: Annotated[
        int, typer.Option(help="Batches at once; 0: enough to keep the engine full.", min=0)
    ] = 0,
    note_every: Annotated[
        int,
        typer.Option(help="Tokens of an answer between notes for who comes after; 0: none.", min=0),
    ] = NOTE_EVERY,
    max_tool_rounds: Annotated[
        int, typer.Option(help="Tool calls answered per turn; more is a loop.", min=0)
    ] = MAX_TOOL_ROUNDS,
    wait_s: Annotated[float, typer.Option(help="Seconds to wait for the engine.", min=0)] = 60.0,
    grace_s: Annotated[
        float,
        typer.Option(help="Seconds for running prompts to end, once told to go.", min=0),
    ] = 0.0,
    idle_exit_s: Annotated[
        float, typer.Option(help="Leave after so many seconds without work; 0: never.", min=0)
    ] = 0.0,
    spot_provider: Annotated[
        str, typer.Option(help="Whose notices count: aws, gcp, azure or none. Default: none.")
    ] = "",
    spot_url: Annotated[str, typer.Option(help="Of its metadata service, if not its own.")] = "",
    spot_rebalance: Annotated[
        bool | None,
        typer.Option(
            "--spot-rebalance/--no-spot-rebalance", help="AWS' recommendation counts too."
        ),
    ] = None,
    spot_file: Annotated[str, typer.Option(help="A file: this host goes once it exists.")] = "",
    metrics_port: Annotated[
        int, typer.Option(help="Answer Prometheus at this port; 0: no.", min=0, max=65535)
    ] = 0,
    metrics_host: Annotated[
        str, typer.Option(help="Where /metrics is answered, without a password.")
    ] = "127.0.0.1",
) -> None:
    """Turn queued batches into commits, through one SGLang server.

    Checks Redis, S3, the run, the model and the engine first. SIGTERM, Ctrl-C or a spot notice
    gives running batches back, half-finished answers noted; a second signal leaves at once.

    Example: dflash-fleet worker --run qwen3-8b --model /models/Qwen3-8B
    """
    if queue and (engine_url or engine_dialect or max_in_flight or idle_exit_s):
        raise BadUsage(
            f"--queue {queue} has no engine: only --run, --model and --batches go with it"
        )
    if queue:
        _become_tokenizer(queue, load_settings({"run": run, "model": model}), batches or 1)
    set_up_logs()
    flags = {
        "run": run,
        "model": model,
        "engine_url": engine_url,
        "engine_dialect": engine_dialect,
        "max_in_flight": max_in_flight,
        "slot": slot,
        "spot_provider": spot_provider,
        "spot_url": spot_url,
        "spot_rebalance": None if spot_rebalance is None else int(spot_rebalance),
        "spot_file": spot_file,
    }
    options = Options(
        wait_s=wait_s,
        grace_s=grace_s,
        num_batches=batches,
        note_every=note_every,
        max_tool_rounds=max_tool_rounds,
        vitals=Limits(idle_exit_s=idle_exit_s),
    )
    settings = load_settings(flags)
    metrics_at = (metrics_host, metrics_port) if metrics_port else None
    raise typer.Exit(_run_celery(Worker(settings, options), settings, metrics_at))


def _become_tokenizer(queue: str, settings: Settings, num_processes: int) -> NoReturn:
    """The trainer's verb, in this process' place: nothing of it is imported here."""
    if queue != celeryconfig.TOKENIZE_QUEUE:
        raise BadUsage(f"--queue {queue}: there is {celeryconfig.TOKENIZE_QUEUE!r}, or none")
    command = [sys.executable, "-m", "fleet", "tokenize", "--follow"]
    command += ["--workers", str(num_processes)]
    os.execve(sys.executable, command, os.environ | settings.environment())


def _run_celery(process: Worker, settings: Settings, metrics_at: tuple[str, int] | None) -> int:
    """Until a signal ends it; the exit code.

    By Celery's own worker and not by its command line, which loads every plugin, Flower among them:
    half a second of CPU at each start.
    """
    worker = process.make_app().Worker(
        hostname=NODE_NAME.format(slot=process.site.slot),
        quiet=True,
        # Workers need to know nothing of each other, and a consumer that listens to them goes deaf
        # with the connection (see celeryconfig).
        without_gossip=True,
        without_mingle=True,
    )
    load = EngineLoad(settings, process.site.slot, process.site.hints)
    if metrics_at:
        serve(WorkerMetrics(process.site, load).read, *metrics_at)
    load.start()
    worker.start()
    load.stop()
    return int(worker.exitcode or 0)
