"""The workers' verbs of `dflash-fleet`: worker, status, flower.

Mounted by fleet.py. A verb's parameters are its flags, however many. Flags win over the
environment (DFLASH_*), that over dflash.toml.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer
from celery.utils.nodenames import host_format

import celeryconfig
from dflash_workers.answering import MAX_TOOL_ROUNDS
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.hints import check_redis, open_hints
from dflash_workers.contract.settings import ENGINE_DIALECTS, Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import err, report
from dflash_workers.logs import set_up_logs
from dflash_workers.opening import NOTE_EVERY, Options
from dflash_workers.status import read_status
from dflash_workers.vitals import Limits
from dflash_workers.worker import Worker

app = typer.Typer()

RunOption = Annotated[str, typer.Option("--run", help="Name of the run.", show_default=False)]

_ENVIRONMENT = """Redis and S3 are named by the environment, or in dflash.toml in lower case and
without DFLASH_: DFLASH_REDIS_URL, DFLASH_REDIS_PREFIX, DFLASH_S3_ENDPOINT, DFLASH_S3_BUCKET,
DFLASH_S3_PREFIX, DFLASH_S3_REGION, DFLASH_S3_ACCESS_KEY, DFLASH_S3_SECRET_KEY. What can differ from
one worker to the next can be set there as well: --engine-url is DFLASH_ENGINE_URL, and so are
--run, --model, --engine-dialect, --max-in-flight, --slot and the four --spot flags. Flags win."""


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
) -> None:
    """Turn queued batches into commits, through one SGLang server.

    Checks Redis, S3, the run, the model and the engine first. SIGTERM, Ctrl-C or a spot notice
    gives running batches back, half-finished answers noted; a second signal leaves at once.

    Example: dflash-fleet worker --run qwen3-8b --model /models/Qwen3-8B
    """
    if queue and (engine_url or engine_dialect or max_in_flight or idle_exit_s):
        raise BadInput(
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
    raise typer.Exit(_run_celery(Worker(load_settings(flags), options)))


@app.command()
def status(
    run: RunOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say how far a run is and who works on it, from S3 and Redis.

    Example: dflash-fleet status --run qwen3-8b --json
    """
    settings = load_settings({"run": run})
    hints = open_hints(settings)
    check_redis(hints.redis, settings)
    report(read_status(open_store(settings), hints, settings.require_run()), as_json=as_json)


@app.command()
def flower(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 5555,
) -> NoReturn:
    """Start Flower, on this machine alone and behind a password.

    The login is DFLASH_FLOWER_LOGIN (or flower_login in dflash.toml): never a flag, because flags
    can be seen by everybody on the machine.

    Example: DFLASH_FLOWER_LOGIN=admin:secret dflash-fleet flower --port 5555
    """
    settings = load_settings({})
    user, _, password = settings.flower_login.partition(":")
    if not user or not password:
        raise BadInput("Flower wants a login: set DFLASH_FLOWER_LOGIN to user:password")
    check_redis(open_hints(settings).redis, settings)
    err.print(f"Flower: http://127.0.0.1:{port}", markup=False)
    environ = os.environ | {
        "BROKER_URL": settings.broker_url,
        "FLOWER_BASIC_AUTH": settings.flower_login,
    }
    options = ["--address=127.0.0.1", f"--port={port}", "--max-tasks=10000"]
    command = [sys.executable, "-m", "celery", "--config=celeryconfig", "flower", *options]
    os.execve(sys.executable, command, environ)


def _become_tokenizer(queue: str, settings: Settings, num_processes: int) -> NoReturn:
    """The trainer's verb, in this process' place: nothing of it is imported here."""
    if queue != celeryconfig.TOKENIZE_QUEUE:
        raise BadInput(f"--queue {queue}: there is {celeryconfig.TOKENIZE_QUEUE!r}, or none")
    command = [sys.executable, "-m", "fleet", "tokenize", "--follow"]
    command += ["--workers", str(num_processes)]
    os.execve(sys.executable, command, os.environ | settings.environment())


def _run_celery(process: Worker) -> int:
    """Until a signal ends it; the exit code.

    By Celery's own worker and not by its command line, which loads every plugin, Flower among them:
    half a second of CPU at each start.
    """
    worker = process.make_app().Worker(
        hostname=host_format(f"{process.site.slot}@%h"),
        quiet=True,
        # Workers need to know nothing of each other, and a consumer that listens to them goes deaf
        # with the connection (see celeryconfig).
        without_gossip=True,
        without_mingle=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
