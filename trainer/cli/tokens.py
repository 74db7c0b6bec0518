"""The tokens' verbs: tokenize, drift, compact.

fleet.py mounts `app`; demo.py calls `make_shards`. The work is done by tokens/.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from celeryconfig import TOKENIZE_QUEUE
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, progress_bar, report
from trainer.cli.words import AsJson, ModelDir, RunName, late

if TYPE_CHECKING:
    from trainer.tokens.compact import CompactReport
    from trainer.tokens.drift import DriftReport
    from trainer.tokens.whole_run import TokenizeReport

app = typer.Typer()


@app.command()
def tokenize(
    run: RunName = "",
    model: ModelDir = "",
    workers: Annotated[int, typer.Option(help="Processes at work.", min=1)] = 1,
    follow: Annotated[
        bool, typer.Option("--follow", help="Stay, and take each batch as it is committed.")
    ] = False,
    metrics_port: Annotated[
        int, typer.Option(help="With --follow: answer Prometheus here; 0: no.", min=0, max=65535)
    ] = 0,
    metrics_host: Annotated[
        str, typer.Option(help="Where /metrics is answered, without a password.")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Make a token shard of every committed batch that has none.

    Safe to repeat, and to run on many machines at once. Imported conversations want --model, for
    its tokenizer. Exit code 3 where a batch was quarantined: what is wrong with it is said.

    Example: dflash-fleet tokenize --run maths --workers 8
    """
    if follow:
        metrics_at = f"{metrics_host}:{metrics_port}" if metrics_port else ""
        follow_commits(load_settings({"run": run, "model": model}), workers, metrics_at)
    made = make_shards(load_settings({"run": run, "model": model}), workers)
    report(dataclasses.asdict(made), as_json=as_json)
    if made.quarantined:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def drift(
    run: RunName = "",
    model: ModelDir = "",
    limit: Annotated[int, typer.Option(help="Answers to look at; 0: all.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Say where tokenizing the conversations' text would differ from the engine's own ids.

    Nothing is written. Example: dflash-fleet drift --run maths --model ./qwen3 --limit 10000
    """
    settings = load_settings({"run": run, "model": model})
    found: DriftReport = late("trainer.tokens.drift").measure_drift(
        open_store(settings), settings.require_run(), settings.model, limit
    )
    report(dataclasses.asdict(found), as_json=as_json)


@app.command()
def compact(
    run: RunName = "",
    megabytes: Annotated[int, typer.Option(help="Size of a large shard.", min=1)] = 256,
    rest: Annotated[
        bool, typer.Option("--rest", help="Join the last ones too, which fill no large shard.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Join a run's small token shards into large ones; readers take either.

    Safe to repeat. The small ones stay. Example: dflash-fleet compact --run maths --rest
    """
    settings = load_settings({"run": run})
    with progress_bar() as bar:
        task = bar.add_task("large shards", total=None, note="")
        made: CompactReport = late("trainer.tokens.compact").compact(
            open_store(settings),
            settings.require_run(),
            shard_bytes=megabytes * 1_000_000,
            with_rest=rest,
            on_shard=lambda key: bar.update(task, advance=1, note=key),
        )
    report(dataclasses.asdict(made), as_json=as_json)


def follow_commits(settings: Settings, num_processes: int, metrics_at: str) -> NoReturn:
    """Become a Celery worker of the tokenizers' queue, until a signal ends it.

    Raises Missing where a run is named and there is none of that name.
    """
    if settings.run:
        read_spec(open_store(settings), settings.run)
    options = ["--queues", TOKENIZE_QUEUE, f"--concurrency={num_processes}"]
    # A consumer that listens to other workers goes deaf with the connection (see celeryconfig).
    options += ["--without-gossip", "--without-mingle", f"--hostname=tokenize-{os.getpid()}@%h"]
    command = [sys.executable, "-m", "celery", "--quiet", "-A", "trainer.tokens.app", "worker"]
    # One core for each process: the tokenizer's own threads would only be in each other's way.
    environ = os.environ | settings.environment() | {"TOKENIZERS_PARALLELISM": "false"}
    environ["TOKENIZE_METRICS_AT"] = metrics_at
    os.execve(sys.executable, command + options, environ)


def make_shards(settings: Settings, num_workers: int = 1) -> TokenizeReport:
    """`tokenize` with a bar."""
    whole_run = late("trainer.tokens.whole_run")
    with progress_bar() as bar:
        task = bar.add_task("shards", total=None, note="")
        made: TokenizeReport = whole_run.tokenize_run(
            settings,
            num_workers=num_workers,
            on_batch=lambda done, total, key: bar.update(
                task, completed=done, total=total, note=key
            ),
        )
    return made
