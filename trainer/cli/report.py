"""The verb report: what a run was, on one page.

fleet.py mounts `app`. The work is done by report/; the data gate's verdict is gate/'s.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_workers.contract.errors import AccessDenied, BadInput, NotEnough, QueueUnavailable
from dflash_workers.contract.events import read_events
from dflash_workers.contract.hints import open_hints
from dflash_workers.contract.queues import translated_redis
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import err, progress_bar
from dflash_workers.contract.terminal import report as tell
from trainer.cli.gate import judge_run, write_page
from trainer.cli.words import AsJson, RunName, late

if TYPE_CHECKING:
    from trainer.report.gathering import Facts

app = typer.Typer()

_BEFORE_S = 3600.0  # workers join before the first claim


@app.command()
def report(
    run: RunName = "",
    page: Annotated[Path, typer.Option("--html", help="The file to write.")] = Path("report.html"),
    training: Annotated[
        list[Path] | None, typer.Option(help="Output folder of a `train` on this disk; repeat.")
    ] = None,
    with_gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Judge the shards, which reads them all.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file that says what a run was: speed, workers, answers, cost, training.

    It loads nothing, so it can be sent to anybody. Example: dflash-fleet report --run maths --html
    maths.html
    """
    settings = load_settings({"run": run})
    facts = gather_run(settings, training or [], with_gate=with_gate)
    write_page(page, late("trainer.report.page").page_of(facts))
    tell(
        {
            "run": facts.run,
            "html": str(page),
            "completed": facts.completed,
            "rejected": facts.rejections.total(),
            "output_tokens": facts.output_tokens,
            "gpu_hours": round(facts.busy.gpu_hours(), 4),
            "cost_usd": facts.cost_usd,
            "passed_gate": facts.gate["passed"] if facts.gate else None,
            "trainers": list(facts.training),
        },
        as_json=as_json,
    )


def gather_run(settings: Settings, training: list[Path], *, with_gate: bool) -> Facts:
    """`report` with a bar."""
    gathering, run = late("trainer.report.gathering"), settings.require_run()
    with progress_bar() as bar:
        task = bar.add_task("commits", total=None, note="")
        facts: Facts = gathering.gather(
            open_store(settings),
            run,
            lambda num, total: bar.update(task, completed=num, total=total),
        )
    facts.training |= {str(folder): _read_local(folder) for folder in training}
    _add_events(facts, settings)
    if with_gate:
        facts.gate = _judge(settings)
    return facts


def _add_events(facts: Facts, settings: Settings) -> None:
    hints = open_hints(settings)
    try:
        with translated_redis(hints.where):
            events = read_events(hints.redis, hints.keys, max(facts.from_s - _BEFORE_S, 0.0))
    except (QueueUnavailable, AccessDenied) as error:
        err.print(f"without what happened to workers: {error}", markup=False)
        facts.has_events = False
        return
    facts.events = [event for event in events if event.at_s <= facts.to_s + _BEFORE_S]


def _judge(settings: Settings) -> Json | None:
    try:
        found = judge_run(settings, [], [])
    except NotEnough as error:
        err.print(f"without a verdict: {error}", markup=False)
        return None
    verdicts = [dataclasses.asdict(v) | {"sentence": v.sentence()} for v in found.verdicts]
    return {"passed": found.passed, "verdicts": verdicts}


def _read_local(folder: Path) -> list[Json]:
    path = folder / "metrics.jsonl"
    try:
        steps: list[Json] = late("trainer.report.gathering").read_steps(path.read_bytes())
    except OSError as error:
        raise BadInput(f"--training {folder}: {path.name}: {error.strerror}") from error
    return steps
