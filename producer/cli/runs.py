"""Verbs over a whole run: seal, pause, resume, cancel, reconcile, gc, and the list of all runs.

Flags and reports only; what they do is in api.py, reconcile.py, garbage.py, listing.py and the
contract's control.py. Errors become one line and an exit code in fleet.py.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from typing import Annotated

import typer

from dflash_workers.contract.control import Action, Control
from dflash_workers.contract.errors import QueueUnavailable, Transient
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from dflash_workers.contract.terminal import err, report
from producer.api import Run
from producer.cli.words import AsJson, RunName, facts, in_words
from producer.enqueue import queue_of, send_planned
from producer.garbage import find_garbage, remove
from producer.ledger import Ledger
from producer.listing import list_runs
from producer.reconcile import LEASE_S, Reconciler, forget_hints

app = typer.Typer()


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
def pause(run: RunName = "", as_json: AsJson = False) -> None:
    """Have workers claim nothing new of a run; what they work on goes on to its end.

    Example: dflash-fleet pause --run first
    """
    with Run.open(load_settings({"run": run})) as opened:
        state = Control(opened.store, opened.spec.run).order(Action.PAUSE)
    report({"run": opened.spec.run, "state": state.value}, as_json=as_json)


@app.command()
def resume(run: RunName = "", as_json: AsJson = False) -> None:
    """Let a paused run go on: sends the batches that have no commit and that nobody works on.

    Example: dflash-fleet resume --run first
    """
    with Run.open(load_settings({"run": run})) as opened:
        name = opened.spec.run
        state = Control(opened.store, name).order(Action.RESUME)
        ledger = Ledger(opened.store, name)
        num_sent = send_planned(ledger, opened.hints, queue_of(opened.spec))
    report({"run": name, "state": state.value, "num_sent": num_sent}, as_json=as_json)


@app.command()
def cancel(
    run: RunName = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """End a run for good; what workers have begun is given up. Committed data stays.

    Example: dflash-fleet cancel --run first --yes
    """
    with Run.open(load_settings({"run": run})) as opened:
        name = opened.spec.run
        progress = opened.progress()
        num_left = progress.num_prompts - progress.num_prompts_done
        if not yes:
            _confirm(f"Cancel run {name!r} for good, with {num_left} prompts unanswered?")
        state = Control(opened.store, name).order(Action.CANCEL)
        try:
            forget_hints(opened.hints, name)
        except QueueUnavailable as error:  # workers read the order from S3 and drop the hints
            err.print(f"cancelled, but: {error}", markup=False, soft_wrap=True)
    report({"run": name, "state": state.value, "num_prompts_left": num_left}, as_json=as_json)


@app.command()
def reconcile(
    run: RunName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Go on until interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send hints again for batches that lost theirs, after two looks 15 s apart.

    Example: dflash-fleet reconcile --run first --watch
    """
    num_sent = 0
    with Run.open(load_settings({"run": run})) as opened:
        reconciler = opened.reconciler()
        _look(reconciler, watch)
        while True:
            time.sleep(LEASE_S)
            num_new = _look(reconciler, watch)
            num_sent += num_new
            if not watch:
                break
            if num_new:
                err.print(f"sent {num_new} hints again")
    found = {"run": opened.spec.run, "state": reconciler.state.value, "num_sent": num_sent}
    report(found, as_json=as_json)


@app.command()
def gc(
    run: RunName = "",
    delete: Annotated[bool, typer.Option("--delete", help="Do it; else only count.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count what no reader will ever follow, such as data of attempts that lost; or delete it.

    Example: dflash-fleet gc --run first --delete
    """
    with Run.open(load_settings({"run": run})) as opened:
        garbage = find_garbage(opened.store, opened.hints, opened.spec.run)
        if delete:
            remove(opened.store, garbage)
    found = {
        "run": opened.spec.run,
        "num_objects": len(garbage),
        "num_bytes": sum(item.num_bytes for item in garbage),
        "kinds": dict(Counter(item.kind for item in garbage)),
        "deleted": delete,
    }
    report(facts(found, as_json), as_json=as_json)


@app.command()
def runs(as_json: AsJson = False) -> None:
    """List the runs in the bucket: state, and how much of them is done.

    Example: dflash-fleet runs
    """
    store = open_store(load_settings({}))
    store.check()
    found = list_runs(store)
    store.client.close()
    if as_json:
        report({"runs": found}, as_json=True)
    else:
        report({name: in_words(known) for name, known in found.items()}, as_json=False)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody is there to be asked: pass --yes")
    typer.confirm(question, abort=True, err=True)


def _look(reconciler: Reconciler, watch: bool) -> int:
    """One look; a watch outlives what it is there to watch for."""
    try:
        return reconciler.look()
    except Transient as error:
        if not watch:
            raise
        err.print(f"{error}: will look again", markup=False, soft_wrap=True)
        return 0
