"""Drafters in S3, beside the runs: put there once by content, fetched by nodes, listed for people.

An id is the folder's name and a hash of its files; `drafters/<id>/SHA256SUMS` is written last, so
that what has it is whole. Read by -> promoter and by node/following, which stages one as any model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from dflash_workers.contract.errors import Corrupt, Missing
from dflash_workers.contract.keys import DRAFTERS
from dflash_workers.contract.provenance import PROVENANCE
from dflash_workers.contract.records import Json
from dflash_workers.contract.store import Store

SUMS, CONFIG = "SHA256SUMS", "config.json"
_ID_DIGITS = 12


def put_drafter(store: Store, folder: Path) -> str:
    """Upload an export; its id. Safe to repeat and to break off. Raises Missing."""
    files = sorted(path for path in folder.glob("*") if path.is_file() and path.name != SUMS)
    if not (folder / CONFIG).is_file() or not any(p.suffix == ".safetensors" for p in files):
        raise Missing(f"{folder}: no drafter: {CONFIG} and *.safetensors are wanted")
    sums = {path.name: _sha256(path) for path in files}
    lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode()
    drafter = f"{folder.resolve().name}-{hashlib.sha256(lines).hexdigest()[:_ID_DIGITS]}"
    for path in files:
        store.put_new(f"{DRAFTERS}{drafter}/{path.name}", path.read_bytes())
    store.put_new(f"{DRAFTERS}{drafter}/{SUMS}", lines)
    return drafter


def list_drafters(store: Store) -> list[str]:
    """The ids of those that are whole."""
    keys = (key for key, _ in store.list(DRAFTERS))
    return [key.split("/")[1] for key in keys if key.endswith(f"/{SUMS}")]


def check_drafter(store: Store, drafter: str) -> None:
    """Raises Missing where there is none of that id, naming those there are."""
    if "/" in drafter or not store.exists(f"{DRAFTERS}{drafter}/{SUMS}"):
        there = ", ".join(list_drafters(store)) or "none"
        raise Missing(
            f"no drafter {drafter!r} in S3, and no folder of that name: there are {there}"
        )


def read_provenance(store: Store, drafter: str) -> Json:
    """What it says of its making; nothing where it says nothing. Raises Corrupt."""
    try:
        found: Json = orjson.loads(store.get(f"{DRAFTERS}{drafter}/{PROVENANCE}"))
    except Missing:
        return {}
    except orjson.JSONDecodeError as error:
        raise Corrupt(f"{drafter}: {PROVENANCE} is not JSON") from error
    if not isinstance(found, dict):
        raise Corrupt(f"{drafter}: {PROVENANCE} holds no object")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
