"""layout.py: what is wrong is said before anything starts; what is right becomes lanes."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput, Corrupt, FleetError, Missing
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import open_store
from dflash_workers.embedded import free_ports
from dflash_workers.node import checks
from dflash_workers.node.folder import NodeFolder
from dflash_workers.node.layout import NodeOptions, lay_out
from tests.dflash_workers.node import engine_stand_in
from tests.dflash_workers.node.test_gpus import LINES


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path / "state")
    folder.make()
    return folder


@pytest.fixture
def options(tmp_path: Path) -> NodeOptions:
    python = engine_stand_in.make(tmp_path / "engine")
    (port,) = free_ports(1)
    return NodeOptions(python, is_cpu=True, base_port=port)


def test_each_gpu_gets_an_engine_and_a_worker_of_its_own(
    options: NodeOptions,
    node_settings: Settings,
    folder: NodeFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{LINES.strip()}'\n")
    os.chmod(tmp_path / "nvidia-smi", 0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DFLASH_S3_SECRET_KEY", "of this shell")

    metrics_at = ("127.0.0.1", 9465)
    lanes = lay_out(replace(options, is_cpu=False, metrics_at=metrics_at), node_settings, folder)

    ports = [lane.worker_argv[lane.worker_argv.index("--metrics-port") + 1] for lane in lanes]
    assert ports == ["9465", "9475"]
    assert [lane.engine.gpu for lane in lanes] == ["GPU-5d1c", "GPU-77ab"]
    assert [lane.engine.port - options.base_port for lane in lanes] == [0, 1]
    for number, lane in enumerate(lanes):
        argv = " ".join(lane.engine.argv)
        assert "--max-running-requests 4 " in argv
        assert "--cuda-graph-max-bs-decode 4" in argv
        environ = lane.worker_environ
        assert environ["DFLASH_ENGINE_URL"] == lane.engine.url
        assert environ["DFLASH_SLOT"] == lane.slot == f"{node_settings.slot}-{number}"
        assert environ["DFLASH_S3_SECRET_KEY"] == node_settings.s3_secret_key
        assert node_settings.s3_secret_key not in repr(lane)


def test_vllm_is_started_in_its_own_words_and_spoken_to_in_openais(
    options: NodeOptions, node_settings: Settings, folder: NodeFolder
) -> None:
    options = replace(options, engine="vllm", engine_args=("--seed 1",))

    (lane,) = lay_out(options, node_settings, folder)

    assert lane.engine.argv == [
        *(str(options.engine_python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", node_settings.model, "--host", "127.0.0.1"),
        *("--port", str(options.base_port), "--dtype", "float32", "--max-num-seqs", "4"),
        *("--disable-uvicorn-access-log", "--seed", "1"),
    ]
    assert lane.worker_environ["DFLASH_ENGINE_DIALECT"] == "openai"


def test_a_new_machine_finds_the_target_beside_the_runs(
    options: NodeOptions, node_settings: Settings, folder: NodeFolder, target_dir: Path
) -> None:
    settings = replace(node_settings, model="")
    with pytest.raises(Missing, match=r"models/tiny: no model there"):
        lay_out(options, settings, folder)
    store = open_store(settings)
    for path in target_dir.iterdir():
        store.replace(f"models/tiny/{path.name}", path.read_bytes())
    store.client.close()

    (lane,) = lay_out(replace(options, stage="disk"), settings, folder)

    assert lane.engine.model_dir.parent == folder.models
    assert lane.worker_environ["DFLASH_MODEL"] == str(lane.engine.model_dir)


def test_another_model_than_the_runs_is_refused(
    options: NodeOptions, node_settings: Settings, folder: NodeFolder, tmp_path: Path
) -> None:
    other = shutil.copytree(node_settings.model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))

    with pytest.raises(BadInput, match="is not that of tiny"):
        lay_out(options, replace(node_settings, model=str(other)), folder)


def test_weights_cut_short_are_refused(
    options: NodeOptions, node_settings: Settings, folder: NodeFolder, tmp_path: Path
) -> None:
    cut = shutil.copytree(node_settings.model, tmp_path / "cut")
    with (cut / "model.safetensors").open("r+b") as weights:
        weights.truncate(1000)

    with pytest.raises(Corrupt, match="fetch it again"):
        lay_out(options, replace(node_settings, model=str(cut)), folder)


def test_a_port_that_is_taken_is_told_before_the_model_is_moved(
    options: NodeOptions,
    node_settings: Settings,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "PORT_WAIT_S", 0.1)
    with (
        socket.create_server(("127.0.0.1", options.base_port)),
        pytest.raises(BadInput, match=f"{options.base_port}: Address already in use"),
    ):
        lay_out(options, replace(node_settings, model="/none"), folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": "tgi"}, "no engine 'tgi'"),
        ({"engine_python": Path("/none/python")}, "no engine at /none/python"),
        ({"presets": ("fast",)}, "no preset 'fast'"),
        ({"stage": "tape"}, "--stage 'tape'"),
    ],
)
def test_a_flag_that_can_not_be_is_named(
    changes: dict[str, object],
    words: str,
    options: NodeOptions,
    node_settings: Settings,
    folder: NodeFolder,
) -> None:
    with pytest.raises(FleetError, match=words):
        lay_out(replace(options, **changes), node_settings, folder)  # type: ignore[arg-type]


def test_a_run_that_does_not_exist_is_told(
    options: NodeOptions, node_settings: Settings, folder: NodeFolder
) -> None:
    with pytest.raises(Missing, match="there is no run 'none'"):
        lay_out(options, replace(node_settings, run="none"), folder)


def test_what_lies_on_a_network_disk_is_measured_and_said(
    options: NodeOptions,
    node_settings: Settings,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("dflash_workers.node.disks.NETWORK_KINDS", {"overlay", "ext4", "tmpfs"})

    lay_out(replace(options, stage="never"), node_settings, folder)

    for place in ("our interpreter", "the engine's venv", "model"):
        assert f"{place} (" in caplog.text
    assert "lies on a network file system" in caplog.text
    assert "MB/s" in caplog.text
