"""A node of two real SGLang engines and two workers, on the CPU profile."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from producer.fingerprint import RunOptions, make_spec
from tests.dflash_workers.node.conftest import NodeProcesses, run_of, until
from tests.tiny_model import make_tiny_model

READY_S = 700.0  # on a machine whose cores are busy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]


@pytest.fixture
def real_node(settings: Settings, engine_python: Path, tmp_path: Path) -> Iterator[NodeProcesses]:
    model_dir = make_tiny_model(tmp_path / "tiny", weights=True)
    spec = make_spec("base", str(model_dir), RunOptions(max_new_tokens=16), None)
    settings = replace(settings, model=str(model_dir), max_in_flight=4)
    store = open_store(settings)
    store.put_new(RunKeys(settings.run).spec, dump(run_of(settings, spec)))
    store.client.close()
    node = NodeProcesses(
        settings, run_of(settings, spec), tmp_path / "state", engine_python, uuid.uuid4().hex
    )
    yield node
    node.close()


def test_two_engines_and_two_workers_serve_one_run_and_are_gone_after_it(
    real_node: NodeProcesses,
) -> None:
    node = real_node.start(*real_node.flags(num_engines=2))
    until(lambda: real_node.is_serving(node), READY_S)
    batches = [real_node.plan(f"one {n}", f"two {n}")[0] for n in range(6)]

    until(lambda: all(map(real_node.is_committed, batches)), READY_S)
    lanes = real_node.facts()["lanes"]
    node.terminate()
    said = real_node.said(node)

    assert node.returncode == 0, said
    assert len({lane["engine"]["pid"] for lane in lanes}) == 2
    assert len({lane["slot"] for lane in lanes}) == 2
    assert "was asked to be" not in said
    assert real_node.processes() == []
