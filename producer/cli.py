"""The producer's verbs: enqueue, seal, reconcile, rejected, audit, runs.

Flags and reports only; what they do is in api.py and audit.py. Errors become one line and an exit
code in fleet.py. A verb has a parameter for each flag, because that is how typer reads them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_workers.contract.errors import BadInput, Transient
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import ExitCode, err, report
from producer.api import Run
from producer.audit import audit as audit_run
from producer.audit import rejections
from producer.fingerprint import RunOptions, read_spec
from producer.ledger import Ledger, run_names
from producer.reconcile import LEASE_S
from producer.sources import check_files

app = typer.Typer()

MAX_FINDINGS = 20  # shown to people; --json has all


def share(given: str | float) -> float:
    """'2%' or '0.02' as 0.02."""
    text = str(given)  # typer hands the default over as it is
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is no share: write 2% or 0.02")
    return value


RunName = Annotated[str, typer.Option("--run", help="Name of the run; or DFLASH_RUN.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def enqueue(
    files: Annotated[list[str], typer.Argument(help="JSON Lines, also .gz, .zst; - is stdin.")],
    run: RunName = "",
    model: Annotated[str, typer.Option(help="Folder of the target model; or DFLASH_MODEL.")] = "",
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file in place of the model's.")
    ] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Passed to the template.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens per turn.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(help="-1: no limit.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 16,
    heldout: Annotated[float, typer.Option(parser=share, help="Share never trained on.")] = 0.02,
    limit: Annotated[int | None, typer.Option(min=0, help="Read the first N rows only.")] = None,
    max_bad: Annotated[
        float, typer.Option(parser=share, help="Most refused rows to accept.")
    ] = 1.0,
    max_queued: Annotated[
        int | None, typer.Option(min=1, help="Hints in the queue to wait at.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count; write and send nothing.")
    ] = False,
    seal_after: Annotated[bool, typer.Option("--seal", help="End the plan afterwards.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan the new rows of prompt files and send them to the queue. Safe to repeat.

    Example: dflash-fleet enqueue prompts.jsonl --run first --model /models/qwen3 --max-tokens 1024
    """
    check_files(files)
    settings = load_settings({"run": run, "model": model})
    options = RunOptions(
        chat_template=_read_template(chat_template),
        template_kwargs=None if thinking is None else {"enable_thinking": thinking},
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
    )
    with Run.create(settings, settings.model, options, dry_run=dry_run) as opened:
        done = opened.enqueue(
            files,
            batch_size=batch_size,
            heldout=heldout,
            limit=limit,
            max_bad=max_bad,
            max_queued=max_queued,
        )
        if seal_after:
            opened.seal()
    report({"run": opened.spec.run, **_facts(dataclasses.asdict(done), as_json)}, as_json=as_json)
    if done.refused:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def seal(run: RunName = "", as_json: AsJson = False) -> None:
    """End the plan: nothing new may be planned, and the run is done when its batches are.

    Example: dflash-fleet seal --run first
    """
    with Run.open(load_settings({"run": run})) as opened:
        opened.seal()
        progress = opened.progress()
    report({"run": opened.spec.run, **dataclasses.asdict(progress)}, as_json=as_json)


@app.command()
def reconcile(
    run: RunName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send hints again for batches that Redis has forgotten, after two looks 15 s apart.

    Example: dflash-fleet reconcile --run first
    """
    num_sent = 0
    with Run.open(load_settings({"run": run})) as opened:
        reconciler = opened.reconciler()
        reconciler.look()
        while True:
            time.sleep(LEASE_S)
            try:
                num_new = reconciler.look()
            except Transient as error:  # the very thing to watch for: look again when it is back
                if not watch:
                    raise
                err.print(f"{error}: will look again", markup=False, soft_wrap=True)
                continue
            num_sent += num_new
            if not watch:
                break
            if num_new:
                err.print(f"sent {num_new} hints again")
    report({"run": opened.spec.run, "num_sent": num_sent}, as_json=as_json)


@app.command()
def rejected(run: RunName = "", as_json: AsJson = False) -> None:
    """Count the rows refused at planning and the prompts rejected by workers, by reason.

    Example: dflash-fleet rejected --run first --json
    """
    with Run.open(load_settings({"run": run})) as opened:
        refused_rows, rejected_prompts = rejections(opened.store, opened.spec.run)
    facts = {"refused": dict(refused_rows), "rejected": dict(rejected_prompts)}
    report({"run": opened.spec.run, **_facts(facts, as_json)}, as_json=as_json)


@app.command()
def audit(run: RunName = "", as_json: AsJson = False) -> None:
    """Prove that every planned prompt has exactly one fate; exit 3 where one has not.

    Example: dflash-fleet audit --run first
    """
    with Run.open(load_settings({"run": run})) as opened:
        result = audit_run(opened.store, opened.spec.run)
    facts = dataclasses.asdict(result)
    if not as_json:
        facts["findings"] = len(result.findings)
        for finding in result.findings[:MAX_FINDINGS]:
            err.print(finding, markup=False, soft_wrap=True)
    report({"run": opened.spec.run, **facts}, as_json=as_json)
    if not result.is_whole:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def runs(as_json: AsJson = False) -> None:
    """List the runs in the bucket.

    Example: dflash-fleet runs
    """
    store = open_store(load_settings({}))
    store.check()
    found = {}
    for name in run_names(store):
        spec = read_spec(store, name)
        if spec is not None:
            ledger = Ledger(store, name)
            ledger.refresh()
            found[name] = {"target": spec.target.name, **dataclasses.asdict(ledger.progress())}
    store.client.close()
    if as_json:
        report({"runs": found}, as_json=True)
    else:
        report({name: _in_words(facts) for name, facts in found.items()}, as_json=False)


def _read_template(path: Path | None) -> str | None:
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: can't be read: {error}") from error


def _facts(facts: Mapping[str, Any], as_json: bool) -> Mapping[str, Any]:
    """Facts as `report` takes them: for people, counts by reason become words."""
    if as_json:
        return facts
    return {k: _in_words(v) if isinstance(v, dict) else v for k, v in facts.items()}


def _in_words(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()) or "none"
