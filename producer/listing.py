"""Every run in the bucket, with its state: also where one of them can't be read.

Reads run.json, control log, plan and commits in S3; -> the verb `runs`. Others keep things in the
bucket, too: a folder without a run.json is no run, and a run.json that is damaged, of another
schema or somebody else's is listed with what is wrong with it.
"""

from __future__ import annotations

from dataclasses import asdict

from dflash_workers.contract.control import Control
from dflash_workers.contract.errors import BadInput, Corrupt, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.plan import read_spec
from dflash_workers.contract.records import Json
from dflash_workers.contract.store import Store
from producer.ledger import Ledger


def list_runs(store: Store) -> dict[str, Json]:
    """By name: target, state, whether sealed, and counts; or `error`."""
    return {
        name: _read_run(store, name)
        for name in store.folders("")
        if store.exists(RunKeys(name).spec)
    }


def _read_run(store: Store, name: str) -> Json:
    try:
        spec = read_spec(store, name)
        state = Control(store, name).state()
        ledger = Ledger(store, name)
        ledger.refresh()
    except (BadInput, Corrupt, Missing) as error:
        return {"error": str(error)}
    return {"target": spec.target.name, "state": state.value, **asdict(ledger.progress())}
