"""The verbs of who watches: status, flower.

Mounted by fleet.py, before all others. Loads nothing of a worker, no Celery and no exporter, so
that a look at a run takes no longer than it must.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.live import Live

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.queues import check_redis, open_queues, open_redis
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import err, out, report
from dflash_workers.flower_command import flower_command
from dflash_workers.screen import screen_of
from dflash_workers.status import Overview

app = typer.Typer()

RunOption = Annotated[str, typer.Option("--run", help="Name of the run.", show_default=False)]

LOOPBACK = "127.0.0.1"


@app.command()
def status(
    run: RunOption = "",
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and draw it anew.")] = False,
    every_s: Annotated[float, typer.Option(help="Seconds between, with --watch.", min=0.2)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Say how far a run is, when it ends, what it costs and who works on it, from S3 and Redis.

    Example: dflash-fleet status --run qwen3-8b --watch
    """
    if watch and as_json:
        raise BadInput("--watch draws for people: call --json as often as you like")
    settings = load_settings({"run": run})
    queues = open_queues(settings)
    check_redis(queues.redis, settings)
    overview = Overview(open_store(settings), queues, settings.require_run())
    if as_json:
        report(overview.read(), as_json=True)
    elif watch:
        _watch(overview, every_s)
    else:
        out.print(screen_of(overview.read()))


@app.command()
def flower(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.", min=1, max=65535)] = 5555,
    state: Annotated[
        Path | None, typer.Option(help="Folder for what it remembers; else your own settings'.")
    ] = None,
) -> NoReturn:
    """Start Flower, on this machine alone and behind a password.

    The login is DFLASH_FLOWER_LOGIN (or flower_login in dflash.toml): never a flag, because flags
    can be seen by everybody on the machine. Its own /metrics asks for no login.

    Example: DFLASH_FLOWER_LOGIN=admin:secret dflash-fleet flower --port 5555
    """
    settings = load_settings({})
    command, secrets = flower_command(settings, port, state)
    check_redis(open_redis(settings), settings)
    err.print(f"Flower: http://{LOOPBACK}:{port}", markup=False)
    os.execve(sys.executable, command, os.environ | secrets)


def _watch(overview: Overview, every_s: float) -> NoReturn:
    with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            live.update(screen_of(overview.read()), refresh=True)
            time.sleep(every_s)
