"""Verbs over what became of a run's prompts: rejected, retry, audit, import, pull.

Flags and reports only; what they do is in rejected.py, retry.py, audit.py, finished.py and pull.py.
Errors become one line and an exit code in fleet.py. A verb has a parameter for each flag, because
that is how typer reads them.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from dflash_workers.contract.control import RunState
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.terminal import ExitCode, err, report
from producer.api import Run
from producer.audit import Audit
from producer.audit import audit as audit_run
from producer.cli.words import AsJson, RunName, facts, late_bar, share, show_refusals
from producer.finished import import_finished
from producer.pull import Form, Heldout, PullOptions
from producer.pull import pull as pull_files
from producer.rejected import export as export_rows
from producer.rejected import refused_rows, rejections
from producer.retry import RetryOptions
from producer.retry import retry as retry_prompts
from producer.sources.inputs import check_inputs

app = typer.Typer()

MAX_FINDINGS = 20  # shown to people; --json has all
STDOUT = "-"

Reasons = Annotated[
    list[str] | None, typer.Option("--reason", help="One or more; repeat it, or use commas.")
]


@app.command()
def rejected(
    run: RunName = "",
    reason: Reasons = None,
    export: Annotated[
        str, typer.Option(help="Write the rows to this file; - is stdout.", metavar="FILE")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Count the rows refused at planning and the prompts rejected by workers, by reason.

    Shows the first refused rows; --export writes the rejected prompts in a form that `enqueue`
    takes again.

    Example: dflash-fleet rejected --run first --reason context_length --export long.jsonl
    """
    if export == STDOUT and as_json:
        raise typer.BadParameter("stdout can't take both --json and --export -")
    reasons = _split(reason)
    with Run.open(load_settings({"run": run})) as opened:
        counts = rejections(opened.store, opened.spec.run)
        refused, by_workers = (_only(reasons, by_reason) for by_reason in counts)
        first = list(islice(refused_rows(opened.store, opened.spec.run, reasons), MAX_FINDINGS))
        if export:
            _export(opened, reasons, export)
    if not as_json:
        show_refusals(first)
    found = {"run": opened.spec.run, "refused": refused, "rejected": by_workers}
    if export != STDOUT:
        report(facts(found, as_json), as_json=as_json)


@app.command()
def retry(
    run: RunName = "",
    reason: Reasons = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens per turn.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="-1: no limit.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 16,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count; write and send nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan rejected prompts again, for the reasons named, and send them. Safe to repeat.

    Example: dflash-fleet retry --run first --reason context_length --max-tokens 512
    """
    given = {
        "max_new_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
    }
    sampling: Json = {name: value for name, value in given.items() if value is not None}
    with Run.open(load_settings({"run": run})) as opened:
        reasons = _split(reason)
        if not reasons:
            _, there = rejections(opened.store, opened.spec.run)
            names = ", ".join(f"{name} ({count})" for name, count in there.most_common())
            raise typer.BadParameter(
                f"name a reason: {names or 'no prompt is rejected'}", param_hint="--reason"
            )
        options = RetryOptions(reasons, sampling, batch_size, dry_run)
        done = retry_prompts(opened.store, opened.hints, opened.spec, options)
    found = {"run": opened.spec.run, **dataclasses.asdict(done), "dry_run": dry_run}
    report(facts(found, as_json), as_json=as_json)


@app.command()
def audit(run: RunName = "", as_json: AsJson = False) -> None:
    """Prove that every row and every planned prompt has exactly one fate; exit 3 where one has not.

    Example: dflash-fleet audit --run first
    """
    with Run.open(load_settings({"run": run})) as opened, late_bar("batches") as bar:
        result = audit_run(opened.store, opened.spec.run, bar)
    found = dataclasses.asdict(result)
    if not as_json:
        found["findings"] = len(result.findings)
        for finding in result.findings[:MAX_FINDINGS]:
            err.print(finding, markup=False, soft_wrap=True)
        if words := _rest_of(result):
            err.print(words, markup=False, soft_wrap=True)
    report({"run": opened.spec.run, **found}, as_json=as_json)
    if not result.is_whole:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command("import")
def import_(
    files: Annotated[list[str], typer.Argument(help="What `enqueue` takes; - is stdin.")],
    run: RunName = "",
    model: Annotated[
        str, typer.Option(help="Folder of the target model, for a run that is new.")
    ] = "",
    heldout: Annotated[float, typer.Option(parser=share, help="Share never trained on.")] = 0.02,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations per batch.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Take finished conversations, made elsewhere, into a run as if they had been made here.

    Nothing is generated: they become plan, data and commits. Safe to repeat.

    Example: dflash-fleet import chats.jsonl --run mixed --model /models/qwen3
    """
    check_inputs(files)
    settings = load_settings({"run": run, "model": model})
    with Run.create(settings, settings.model) if settings.model else Run.open(settings) as opened:
        done = import_finished(
            opened.store, settings, files, heldout=heldout, batch_size=batch_size
        )
    found = {"run": opened.spec.run, **dataclasses.asdict(done)}
    report(facts(found, as_json), as_json=as_json)
    if done.refused:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def pull(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are to lie.")],
    run: RunName = "",
    form: Annotated[Form, typer.Option("--as", help="What the files are.")] = Form.JSONL,
    heldout: Annotated[
        Heldout, typer.Option(help="Held-out rows: with the others, alone, not at all.")
    ] = Heldout.BOTH,
    as_json: AsJson = False,
) -> None:
    """Bring what was committed to a local disk, a file per batch; again: only what is new.

    Example: dflash-fleet pull rows --run first --as parquet --heldout without
    """
    options = PullOptions(form, heldout)
    with Run.open(load_settings({"run": run})) as opened, late_bar("batches") as bar:
        done = pull_files(opened.store, opened.spec.run, folder, options, bar)
    report({"run": opened.spec.run, **dataclasses.asdict(done)}, as_json=as_json)


def _rest_of(result: Audit) -> str:
    """What is to be known of prompts without a fate, and of the run if it isn't active."""
    waiting = f"{result.num_waiting} prompts"
    if result.state == RunState.CANCELLED.value:
        return f"the run is cancelled: {waiting} were never answered, and won't be"
    if result.state == RunState.PAUSED.value:
        return f"the run is paused: {waiting} wait for `dflash-fleet resume`"
    return f"not finished: {waiting} wait for an answer" if result.num_waiting else ""


def _split(given: list[str] | None) -> frozenset[str]:
    names = (name.strip() for text in given or [] for name in text.split(","))
    return frozenset(name for name in names if name)


def _only(reasons: frozenset[str], counts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if not reasons or name in reasons}


def _export(opened: Run, reasons: frozenset[str], path: str) -> None:
    lines = export_rows(opened.store, opened.spec.run, reasons)
    if path == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.writelines(lines)
        return
    try:
        with open(path, "wb") as file:
            file.writelines(lines)
    except OSError as error:
        raise BadInput(f"{path}: can't be written: {error.strerror}") from error
