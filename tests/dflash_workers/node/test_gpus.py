"""gpus.py and checks.py: the GPUs that nvidia-smi tells, chosen and judged.

nvidia-smi is a program on the PATH that prints what the real one prints.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput, FleetError, Missing, NotEnough
from dflash_workers.node import checks
from dflash_workers.node.checks import check_gpus, check_ports, check_room
from dflash_workers.node.gpus import Gpu, find_gpus, parse_gpus
from dflash_workers.node.installed import Versions, read_versions, version_key
from tests.dflash_workers.node import engine_stand_in

LINES = """\
0, GPU-5d1c, NVIDIA H200, 580.95.05, 143771, 143166, 9.0
1, GPU-77ab, NVIDIA H200, 580.95.05, 143771, 20000, 9.0
"""
H200 = Gpu("0", "GPU-5d1c", "NVIDIA H200", "580.95.05", 143771, 143166, 9.0)
CUDA_13 = Versions(Path("python"), {"torch": "2.11.0+cu130"})


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    (tmp_path / "lines").write_text(LINES)
    program.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/lines\n")
    os.chmod(program, 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("wanted", "visible", "found"),
    [
        ([], None, ["0", "1"]),
        (["1"], None, ["1"]),
        (["1", "0"], None, ["0", "1"]),
        (["GPU-77"], None, ["1"]),
        ([], "1", ["1"]),
        ([], "GPU-5d1c", ["0"]),
    ],
)
def test_gpus_are_chosen_by_index_or_uuid_among_the_visible(
    wanted: list[str], visible: str | None, found: list[str]
) -> None:
    assert [gpu.index for gpu in find_gpus(wanted, visible)] == found


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("wanted", "visible", "words"),
    [
        (["2"], None, "--gpus names '2', and the GPUs here are: 0, 1"),
        (["0"], "1", "--gpus names '0', and the GPUs here are: 1"),
        ([], "", "no GPU is left"),
    ],
)
def test_a_gpu_that_is_not_there_is_named(
    wanted: list[str], visible: str | None, words: str
) -> None:
    with pytest.raises(FleetError, match=words):
        find_gpus(wanted, visible)


def test_what_nvidia_smi_tells_is_read_by_column() -> None:
    assert parse_gpus(LINES.splitlines())[0] == H200


def test_a_gpu_that_fell_off_the_bus_is_told() -> None:
    with pytest.raises(NotEnough, match="fallen off the bus"):
        parse_gpus(["0, GPU-5d1c, NVIDIA H200, 580.95.05, [Unknown Error], 0, 9.0"])


def test_a_machine_without_a_driver_says_so(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    with pytest.raises(Missing, match="NVIDIA-SMI has failed"):
        find_gpus([], None)

    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Missing, match="no nvidia-smi"):
        find_gpus([], None)


@pytest.mark.parametrize(
    ("gpu", "model_bytes", "words"),
    [
        (replace(H200, driver="535.1"), 0, "driver 535.1 is too old for torch's CUDA 13"),
        (replace(H200, compute_capability=7.0), 0, "compute capability 7.0"),
        (H200, 140 << 30, "leave no room for a KV cache"),
    ],
)
def test_a_gpu_that_can_not_serve_the_model_is_refused_at_the_start(
    gpu: Gpu, model_bytes: int, words: str
) -> None:
    with pytest.raises(FleetError, match=words):
        check_gpus([gpu], CUDA_13, model_bytes)


def test_a_gpu_that_somebody_uses_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_gpus([H200, replace(H200, index="1", free_mib=20000)], CUDA_13, 15 << 30)

    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "GPU 1 (NVIDIA H200, 19 of 140 GiB free): somebody else uses it; see nvidia-smi"
    ]


def test_a_port_that_stays_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PORT_WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(BadInput, match=rf"127.0.0.1:{port}: Address already in use"):
            check_ports("127.0.0.1", [port])


def test_a_port_that_an_engine_is_leaving_is_waited_for() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    leaving = threading.Timer(0.5, taken.close)
    leaving.start()

    check_ports("127.0.0.1", [taken.getsockname()[1]])

    leaving.join()


def test_small_shared_memory_is_a_warning_and_a_full_disk_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(tmp_path, shm=tmp_path / "none")

    assert "--shm-size" in caplog.text
    monkeypatch.setattr("dflash_workers.node.checks.MIN_DISK_BYTES", 1 << 60)
    with pytest.raises(NotEnough, match="of disk free"):
        check_room(tmp_path)


def test_the_engines_versions_are_asked_of_its_own_interpreter(tmp_path: Path) -> None:
    versions = read_versions(engine_stand_in.make(tmp_path))

    assert versions.require("sglang") == "0.5.17"
    assert versions.cuda_major is None
    with pytest.raises(Missing, match="no engine at"):
        read_versions(tmp_path / "none")


def test_a_venv_without_the_engine_is_named() -> None:
    with pytest.raises(Missing, match="python has no sglang"):
        CUDA_13.require("sglang")
    assert CUDA_13.cuda_major == 13
    assert Versions(Path("p"), {"nvidia-cuda-runtime-cu12": "12.8.90"}).cuda_major == 12


def test_versions_are_ordered_as_releases_are() -> None:
    ordered = ["0.5.9", "0.5.10", "0.5.13.post1", "0.5.14rc1", "0.6"]

    assert sorted(ordered, key=version_key) == ordered
