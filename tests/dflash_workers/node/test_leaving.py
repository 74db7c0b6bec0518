"""leaving.py: what would be lost with the machine, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from dflash_workers.embedded import free_ports
from dflash_workers.node.folder import NodeFolder
from dflash_workers.node.leaving import find_held, send_logs


@pytest.fixture
def folder(tmp_path: Path, settings: Settings) -> NodeFolder:
    """Of a node that has stopped."""
    folder = NodeFolder(tmp_path / "state")
    folder.make()
    folder.write({"pid": 1, "run": settings.run, "lanes": [{"slot": "here-0"}]})
    return folder


def held(folder: NodeFolder, settings: Settings, store: Store, *roots: Path) -> list[str]:
    return [each.what for each in find_held(folder, settings, store, roots)]


def test_a_folder_without_logs_holds_nothing(
    folder: NodeFolder, settings: Settings, store: Store
) -> None:
    assert held(folder, settings, store) == []


def test_a_node_that_runs_holds_its_process(
    folder: NodeFolder, settings: Settings, store: Store
) -> None:
    with folder.held():
        assert held(folder, settings, store) == ["process"]


def test_batches_are_held_by_workers_that_beat(
    folder: NodeFolder, settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    redis_client.hset(f"{settings.redis_prefix}worker:here-0", mapping={"batches": 3})
    redis_client.hset(f"{settings.redis_prefix}worker:elsewhere-0", mapping={"batches": 5})

    (batches,) = find_held(folder, settings, store, [])

    assert (batches.what, batches.where) == ("batches", "here-0")
    assert batches.detail.startswith("3 ")


def test_what_can_not_be_told_is_not_taken_for_nothing(
    folder: NodeFolder, settings: Settings, store: Store, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    silent = replace(settings, redis_url=f"redis://127.0.0.1:{port}/0")

    assert held(folder, silent, store, tmp_path / "none") == ["unknown", "unknown"]


def test_logs_are_held_until_they_were_sent_as_they_are(
    folder: NodeFolder, settings: Settings, store: Store
) -> None:
    log = folder.logs / "engine-0.log"
    log.write_text("few words\n")
    (folder.logs / "worker-0.log").touch()
    before = held(folder, settings, store)

    num_sent = send_logs(folder, store, settings.run)
    after = held(folder, settings, store)
    with log.open("a") as more:
        more.write("more words\n")

    assert (before, num_sent, after) == (["logs"], 1, [])
    assert held(folder, settings, store) == ["logs"]
    (sent,) = [key for key, _ in store.list(f"{settings.run}/nodes/")]
    assert sent.endswith("/engine-0.log.zst")


def test_checkpoints_are_held_until_they_stand_in_s3(
    folder: NodeFolder, settings: Settings, store: Store, tmp_path: Path
) -> None:
    step = tmp_path / "drafter" / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    (step / "drafter.safetensors").write_bytes(b"weights")
    before = held(folder, settings, store, tmp_path / "drafter")

    store.replace(f"{settings.run}/train/d/step-00000010/drafter.safetensors", b"weights")

    assert before == ["checkpoints"]
    assert held(folder, settings, store, tmp_path / "drafter") == []
