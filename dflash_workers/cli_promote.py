"""The verbs of the closed loop: promote, drafters.

Mounted by fleet.py; promotion/ does the work, nodes carry out what it decides. A verb's parameters
are its flags, however many.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.provenance import check_made_with, may_differ
from dflash_workers.contract.queues import check_redis, open_redis
from dflash_workers.contract.records import Json
from dflash_workers.contract.serving import ServingEntry, ServingLog
from dflash_workers.contract.settings import Settings, load_settings
from dflash_workers.contract.store import Store, open_store
from dflash_workers.contract.terminal import ExitCode, err, out, report
from dflash_workers.promotion.drafters import (
    check_drafter,
    list_drafters,
    put_drafter,
    read_provenance,
)
from dflash_workers.promotion.lease import PromoterLease
from dflash_workers.promotion.observing import Fleet
from dflash_workers.promotion.promoter import Patience, Promoter
from dflash_workers.promotion.verdict import Rule

_RULE = Rule()

app = typer.Typer()

RunOption = Annotated[str, typer.Option("--run", help="Name of the run.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def promote(
    drafter: Annotated[
        str, typer.Argument(help="Folder of an export, or an id that `drafters` shows.")
    ] = "",
    run: RunOption = "",
    slot: Annotated[
        str, typer.Option(help="Worker of the engine to try it on.", show_default=False)
    ] = "",
    gain: Annotated[float, typer.Option(help="Faster by at least this share.")] = _RULE.gain,
    confidence: Annotated[float, typer.Option(help="To be so sure.")] = _RULE.confidence,
    max_requests: Annotated[
        int, typer.Option(help="Of the engine on trial, then it is refused.")
    ] = _RULE.max_requests,
    window_s: Annotated[float, typer.Option(help="Seconds compared at once.")] = _RULE.window_s,
    override: Annotated[
        list[str] | None,
        typer.Option(help="target: though it was trained for another.", show_default=False),
    ] = None,
    no_trial: Annotated[bool, typer.Option("--no-trial", help="Serve it at once.")] = False,
    nothing: Annotated[bool, typer.Option("--none", help="Serve no drafter any more.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Have the fleet draft with a better drafter, if it is one.

    It is tried on one engine while all work on the run: promoted where tokens per second, at the
    concurrency that the fleet has, are surely higher, else withdrawn again. Exit code 3 where it is
    refused. Nodes follow that were started without --drafter.

    Example: dflash-fleet promote ./export --run maths
    """
    settings = load_settings({"run": run})
    if bool(drafter) == nothing:
        raise BadInput("name one drafter (see `dflash-fleet drafters`), or pass --none")
    rule = Rule(gain, confidence, max_requests, window_s=window_s)
    has_override = may_differ(override or [])
    store = open_store(settings)
    store.check()
    chosen = "" if nothing else _ready(store, settings, drafter, has_override)
    with open_redis(settings, timeout_s=10) as client:
        check_redis(client, settings)
        keys, where = RedisKeys(settings.redis_prefix), settings.public_redis_url()
        promoter = Promoter(
            ServingLog(store, settings.run),
            Fleet(client, keys, where),
            partial(PromoterLease, client, keys, settings.run, where),
            run=settings.run,
            patience=Patience(),
            say=lambda text: err.print(text, markup=False, soft_wrap=True),
        )
        if nothing or no_trial:
            report(_facts(promoter.order(chosen)), as_json=as_json)
            return
        decision = promoter.promote(chosen, rule, slot)
    report(
        {"promoted": decision.is_promoted, "why": decision.why} | _facts(decision.entry),
        as_json=as_json,
    )
    if not decision.is_promoted:
        raise typer.Exit(ExitCode.SOME_REFUSED)


@app.command()
def drafters(run: RunOption = "", as_json: JsonOption = False) -> None:
    """List the drafters in S3 and what became of them in a run, the latest decision first.

    Example: dflash-fleet drafters --run maths
    """
    settings = load_settings({"run": run})
    store = open_store(settings)
    settings.require_run()
    log = ServingLog(store, settings.run)
    history = [_facts(entry) for entry in reversed(log.history())]
    facts = {"serves": log.last().drafter, "drafters": list_drafters(store), "history": history}
    if as_json:
        report(facts, as_json=True)
        return
    out.print(f"serves    {facts['serves'] or 'no drafter'}", markup=False)
    for drafter in list_drafters(store):
        out.print(f"in S3     {drafter}", markup=False, soft_wrap=True)
    for entry in log.history()[::-1]:
        out.print(_line_of(entry), markup=False, soft_wrap=True)


def _ready(store: Store, settings: Settings, drafter: str, has_override: bool) -> str:
    """The id of what was named, in S3 and fit for the run."""
    spec = read_spec(store, settings.require_run())
    folder = Path(drafter)
    if folder.is_dir():
        drafter = put_drafter(store, folder)
        err.print(f"in S3: {drafter}", markup=False)
    check_drafter(store, drafter)
    if not has_override:
        check_made_with(read_provenance(store, drafter), spec, drafter)
    return drafter


def _facts(entry: ServingEntry) -> Json:
    trial = dataclasses.asdict(entry.trial) if entry.trial else None
    return {
        "number": entry.number,
        "action": entry.action,
        "serves": entry.drafter,
        "trial": trial,
        "at": entry.at,
        "by": entry.by,
        "evidence": entry.evidence,
    }


def _line_of(entry: ServingEntry) -> str:
    what = entry.evidence.get("refused") or entry.drafter or "no drafter"
    if entry.trial:
        what = f"{entry.trial.drafter} on {entry.trial.slot}"
    return f"{entry.action:<8}  {what}: {entry.evidence.get('why', '')}".rstrip(": ")
