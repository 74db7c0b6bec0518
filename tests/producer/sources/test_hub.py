from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput
from producer.sources.hub import PROBE_TIMEOUT_S
from producer.sources.inputs import check_inputs
from tests.producer.sources.reading import read, rows

ROOT = Path(__file__).parents[3]

READ_HUB = """
import sys
import time
import datasets
from dflash_workers.contract.errors import StoreUnavailable
from dflash_workers.contract.settings import Settings
from producer.sources.inputs import read_items
began_s = time.monotonic()
try:
    list(read_items(["hf:some-org/some-name"], Settings()))
except StoreUnavailable as error:
    print(error)
print(time.monotonic() - began_s, file=sys.stderr)
"""


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    """What a data set's repository holds: two splits, and values whose type changes."""
    folder = tmp_path / "data set"
    folder.mkdir()
    train = [{"id": "1", "args": {"a": 1}, "t": None}, {"id": "2", "args": "text", "t": "x"}]
    for name, given in (("train", train), ("test", [{"id": "3", "args": 5, "t": None}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return folder


def test_every_split_is_read_and_named_in_the_source(data_set: Path) -> None:
    found = read(f"hf:{data_set}")

    assert [(source.rpartition("@")[2], row) for source, row in found] == [
        ("train#1", {"id": "1", "args": {"a": 1}, "t": None}),
        ("train#2", {"id": "2", "args": "text", "t": "x"}),
        ("test#1", {"id": "3", "args": 5, "t": None}),
    ]


def test_one_split_may_be_asked_for_and_a_configuration(data_set: Path) -> None:
    found = read(f"hf:{data_set}:default@test")

    assert [source for source, _ in found] == [f"hf:{data_set}:default@test#1"]


@pytest.mark.parametrize(
    ("end", "what"),
    [
        ("@nope", r"nope.*train"),
        (":nope", r"nope.*default"),
        ("@", "write hf:ORG/NAME"),
        ("/gone", "find any data file"),
    ],
)
def test_what_the_data_set_does_not_have_is_one_clear_line(
    data_set: Path, end: str, what: str
) -> None:
    with pytest.raises(BadInput, match=rf"^hf:[^\n]*{what}[^\n]*$"):
        read(f"hf:{data_set}{end}")


def test_guessed_types_that_break_later_are_an_error_that_says_how_to_go_on(
    data_set: Path,
) -> None:
    with (data_set / "train.jsonl").open("w") as file:
        for n in range(20_000):
            file.write(json.dumps({"args": n, "t": "x" * 1000}) + "\n")
        file.write('{"args":"text"}\n')

    with pytest.raises(BadInput, match="download the data set's files and name those"):
        read(f"hf:{data_set}@train")

    assert len(rows(data_set / "train.jsonl")) == 20_001


def test_a_saved_data_set_is_to_be_named_without_the_scheme(tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()

    with pytest.raises(BadInput, match="name the folder without hf:"):
        check_inputs([f"hf:{tmp_path}"])


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    with pytest.raises(BadInput, match=r"pip install 'dflash-fleet\[hub\]'"):
        check_inputs(["hf:some-org/some-name"])


@pytest.mark.parametrize("reach", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_hub_that_is_not_reached_is_one_line_with_what_to_do(reach: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_HUB],
        env=os.environ | reach,
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )

    assert done.stdout.startswith("hf:some-org/some-name: ")
    assert "check the network, or download" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "Retrying" not in done.stderr


@pytest.mark.slow
def test_a_hub_that_says_nothing_is_waited_for_briefly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", READ_HUB],
            env=os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{port}"},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )

    assert "check the network, or download" in done.stdout
    assert float(done.stderr.split()[-1]) < 2 * PROBE_TIMEOUT_S
