"""The verb `exporter`: a fleet's numbers for Prometheus.

Mounted by fleet.py. Apart from cli_watch, so that a look at a run doesn't load what answers
Prometheus.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from dflash_workers.contract.queues import check_redis, open_queues
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import err
from dflash_workers.exporter import Exporter
from dflash_workers.exposition import serve
from dflash_workers.logs import set_up_logs

app = typer.Typer()

LOOPBACK = "127.0.0.1"


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
    queues = open_queues(settings)
    check_redis(queues.redis, settings)
    measuring = Exporter(open_store(settings), queues, names, progress_file)
    where = serve(measuring.read, host, port)
    err.print(f"metrics: http://{host}:{where}/metrics", markup=False)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    measuring.run(every_s, stop)
