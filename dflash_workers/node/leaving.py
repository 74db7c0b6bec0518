"""What a node still holds that S3 doesn't: asked before its disk is thrown away.

Read from the node's folder, its workers' heartbeats and S3, for -> cli_node. Finished rows and
half-finished answers are noted in Redis and committed to S3, so a node that has left holds no
prompt; what can be lost with it are its logs, and checkpoints of a training on it. Logs are sent
to S3 by `send_logs`, under nodes/<host>/ of the run: for people, overwritten by the next sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
import zstandard

from dflash_workers.contract.errors import FleetError
from dflash_workers.contract.keys import RedisKeys
from dflash_workers.contract.queues import open_redis, translated_redis
from dflash_workers.contract.records import Json
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.node.folder import NodeFolder

_SENT = "sent.json"  # in the node's folder: which logs stand in S3, by name, size and time


@dataclass(frozen=True, slots=True)
class Held:
    """One thing that would be lost, or can't be told."""

    what: str  # process | batches | logs | checkpoints | unknown
    where: str
    detail: str


def find_held(
    folder: NodeFolder, settings: Settings, store: Store, checkpoints: Sequence[Path]
) -> list[Held]:
    """Everything that is held; empty: the machine may go."""
    facts = folder.read()
    held = []
    if folder.is_alive():
        pid = f"pid {facts.get('pid')}"
        held.append(Held("process", str(folder.path), f"the node runs ({pid}): stop it first"))
    held += _held_batches(facts, settings)
    run = settings.run or str(facts.get("run", ""))
    for path in _logs(folder):
        if _mark(path) != _sent(folder).get(path.name):
            held.append(Held("logs", str(path), f"{path.stat().st_size} bytes, not in S3"))
    for root in checkpoints:
        held += _held_checkpoints(root, store, run)
    return held


def send_logs(folder: NodeFolder, store: Store, run: str) -> int:
    """Every log that isn't in S3 as it is now, compressed; how many were sent."""
    host = str(folder.read().get("host", "")) or "unknown"
    sent, num_sent = _sent(folder), 0
    for path in _logs(folder):
        mark = _mark(path)
        if sent.get(path.name) == mark:
            continue
        store.replace(f"{run}/nodes/{host}/{path.name}.zst", zstandard.compress(path.read_bytes()))
        sent[path.name] = mark
        num_sent += 1
    (folder.path / _SENT).write_bytes(orjson.dumps(sent))
    return num_sent


def as_facts(held: Sequence[Held]) -> Json:
    """For `--json`."""
    return {"num_held": len(held), "held": [asdict(each) for each in held]}


def _held_batches(facts: Json, settings: Settings) -> list[Held]:
    """By the heartbeats: a worker that has left has none, one that died has it for seconds."""
    slots = [str(lane["slot"]) for lane in facts.get("lanes", [])]
    keys, where = RedisKeys(settings.redis_prefix), settings.public_redis_url()
    held = []
    try:
        with open_redis(settings, timeout_s=10) as client, translated_redis(where):
            for slot in slots:
                num_batches = int(client.hget(keys.worker(slot), "batches") or 0)
                if num_batches:
                    held.append(Held("batches", slot, f"{num_batches} claimed by its worker"))
    except FleetError as error:
        held.append(Held("unknown", where, f"whether batches are held: {error}"))
    return held


def _held_checkpoints(root: Path, store: Store, run: str) -> list[Held]:
    """Files that are nowhere under the run's train/ with their size."""
    if not root.is_dir():
        return [Held("unknown", str(root), "there is no such folder")]
    names = {(key.rpartition("/")[2], size) for key, size in store.list(f"{run}/train/")}
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    missing = [path for path in files if (path.name, path.stat().st_size) not in names]
    if not missing:
        return []
    num_bytes = sum(path.stat().st_size for path in missing)
    detail = f"{len(missing)} files, {num_bytes} bytes, not in S3"
    return [Held("checkpoints", str(root), detail)]


def _logs(folder: NodeFolder) -> list[Path]:
    return [path for path in sorted(folder.logs.glob("*.log*")) if path.stat().st_size]


def _mark(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_size} {facts.st_mtime_ns}"


def _sent(folder: NodeFolder) -> dict[str, str]:
    try:
        marks: dict[str, str] = orjson.loads((folder.path / _SENT).read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return marks
