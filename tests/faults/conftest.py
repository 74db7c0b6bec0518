"""What the fault tests share: a tiny model, fleets of real processes, and runs to be broken."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_workers.contract.records import RunSpec, Target
from dflash_workers.embedded import S3Login
from producer.fingerprint import RunOptions, make_spec
from tests.conftest import BUCKET
from tests.faults.fleet import Fleet, Place
from tests.faults.runs import KEPT_SLOT, FaultRun
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokenizer can be loaded."""
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def base_spec(model_dir: Path) -> RunSpec:
    """A run of that target."""
    return make_spec("base", str(model_dir), RunOptions(max_new_tokens=256), None)


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, s3_login: S3Login
) -> Iterator[Fleet]:
    """One for all tests of a file: its workers and its engine are used again where they live."""
    folder = tmp_path_factory.mktemp("fleet")
    place = Place(folder, model_dir, s3_login, BUCKET)
    with Fleet(place, f"faults-{uuid.uuid4().hex[:8]}") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared_target(base_spec: RunSpec) -> Target:
    """Of all runs of a file that one worker serves."""
    return dataclasses.replace(base_spec.target, weights_sha256=uuid.uuid4().hex)


@pytest.fixture
def shared_run(fleet: Fleet, base_spec: RunSpec, shared_target: Target) -> Iterator[FaultRun]:
    """A run of this test alone, for the worker that all such tests of the file share."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    spec = dataclasses.replace(base_spec, run=name, target=shared_target)
    fleet.s3_proxy.requests.clear()
    yield FaultRun(fleet, spec)
    fleet.s3_proxy.rules.clear()
    print(fleet.logs())


@pytest.fixture
def run(fleet: Fleet, base_spec: RunSpec) -> Iterator[FaultRun]:
    """A run of this test alone, whose target (and so whose queue) is nobody else's."""
    name = f"run-{uuid.uuid4().hex[:12]}"
    target = dataclasses.replace(base_spec.target, weights_sha256=uuid.uuid4().hex)
    spec = dataclasses.replace(base_spec, run=name, target=target)
    fleet.s3_proxy.requests.clear()
    yield FaultRun(fleet, spec)
    fleet.s3_proxy.rules.clear()
    for slot, worker in fleet.workers.items():
        if slot != KEPT_SLOT:
            worker.close()
    print(fleet.logs())
