"""The verbs of who watches: status, flower, exporter.

Mounted by fleet.py, before all others, and loads nothing of a worker: a look at a run takes no
longer than it must.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.live import Live

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.hints import check_redis, open_hints
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import err, out, report
from dflash_workers.exporter import Exporter
from dflash_workers.exposition import serve
from dflash_workers.flower_command import flower_command
from dflash_workers.logs import set_up_logs
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
    hints = open_hints(settings)
    check_redis(hints.redis, settings)
    overview = Overview(open_store(settings), hints, settings.require_run())
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
    check_redis(open_hints(settings).redis, settings)
    err.print(f"Flower: http://{LOOPBACK}:{port}", markup=False)
    os.execve(sys.executable, command, os.environ | secrets)


@app.command()
def exporter(
    runs: Annotated[
        list[str] | None, typer.Option("--run", help="Name of a run; repeat.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="Of /metrics.", min=0, max=65535)] = 9464,
    host: Annotated[
        str, typer.Option(help="Where /metrics is answered, without a password.")
    ] = LOOPBACK,
    every_s: Annotated[float, typer.Option(help="Seconds between measurements.", min=0.1)] = 10.0,
    progress_file: Annotated[
        Path | None, typer.Option(help="Keep a copy of the first run's progress.json here.")
    ] = None,
) -> None:
    """Tell Prometheus how runs and their workers do, from S3 and Redis.

    One for a fleet, beside it: see deploy/prometheus. Writes progress.json where no worker does.

    Example: dflash-fleet exporter --run qwen3-8b --progress-file progress.json
    """
    names = runs or [load_settings({}).require_run()]
    settings, *_others = [load_settings({"run": name}) for name in names]  # each name is checked
    set_up_logs()
    hints = open_hints(settings)
    check_redis(hints.redis, settings)
    measuring = Exporter(open_store(settings), hints, names, progress_file)
    where = serve(measuring.read, host, port)
    err.print(f"metrics: http://{host}:{where}/metrics", markup=False)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    measuring.run(every_s, stop)


def _watch(overview: Overview, every_s: float) -> NoReturn:
    with Live(console=out, auto_refresh=False, screen=out.is_terminal) as live:
        while True:
            live.update(screen_of(overview.read()), refresh=True)
            time.sleep(every_s)
