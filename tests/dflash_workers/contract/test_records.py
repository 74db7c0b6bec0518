"""Records: one door from JSON, through which nothing half-understood comes in."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest

from dflash_workers.contract.errors import Corrupt
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    Prompt,
    Rejection,
    Row,
    RunSpec,
    Sampling,
    Segment,
    Target,
    Turn,
    decode,
    encode,
)

TARGET = Target("tiny", "c", "t", "m", "w", 512, 4096, "bfloat16")
SPEC = RunSpec(
    1, "run", TARGET, "{{ x }}", {"a": [1, None]}, Sampling(0.6, 1, 20, 9, [2]), "rollout", "escape"
)
ANSWER = Answer(
    0, [1, 2], [3], [1], "hi", "", [], "stop", 0, 0.5, 7, {"accepted": 3}, ["truncated"]
)
ROW = Row("k", "i", 0, False, "f:1", [{"role": "user"}], [], [ANSWER, ANSWER])
PROMPT = Prompt("k", "i", [Turn([{"role": "user"}], [{"name": "f"}])], [], True, "f:1")
COMMIT = Commit(
    schema=SCHEMA_VERSION,
    run="run",
    segment=3,
    batch="b",
    attempt="a",
    data_key="d",
    sha256="s",
    data_bytes=10,
    num_rows=2,
    rejected=[Rejection("k", "i", "r", "d")],
    input_tokens=1,
    output_tokens=2,
    started_at=0.5,
    finished_at=2,
    worker="w",
    engine={"version": "1"},
)


@pytest.mark.parametrize("record", [SPEC, ROW, PROMPT, COMMIT, ANSWER])
def test_a_record_survives_the_way_to_json_and_back(record: Any) -> None:
    value = json.loads(json.dumps(encode(record)))

    assert decode(type(record), value) == record


def test_a_field_with_a_default_may_be_missing() -> None:
    value = encode(ROW)
    del value["flags"], value["metadata"]

    assert decode(Row, value) == ROW


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"extra": 1}, "Commit: unknown field 'extra'"),
        ({"segment": "3"}, "Commit.segment: expected int, found str"),
        ({"segment": True}, "Commit.segment: expected int, found bool"),
        ({"segment": 3.0}, "Commit.segment: expected int, found float"),
        ({"segment": None}, "Commit.segment: expected int, found NoneType"),
        ({"started_at": "now"}, "Commit.started_at: expected a number"),
        ({"started_at": True}, "Commit.started_at: expected a number"),
        ({"rejected": {}}, "Commit.rejected: expected a list"),
        ({"rejected": [[]]}, r"Commit.rejected\[0\]: expected an object"),
        ({"rejected": [{"key": "k"}]}, r"Commit.rejected\[0\]: missing field 'detail'"),
        ({"engine": []}, "Commit.engine: expected an object"),
    ],
)
def test_a_wrong_field_is_corrupt_and_named(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(Corrupt, match=complaint):
        decode(Commit, {**encode(COMMIT), **change})


def test_each_field_without_a_default_must_be_there() -> None:
    for name in encode(COMMIT).keys() - {"road", "notes"}:
        rest = {k: v for k, v in encode(COMMIT).items() if k != name}
        with pytest.raises(Corrupt, match=f"missing field '{name}'"):
            decode(Commit, rest)


@pytest.mark.parametrize("ids", [[1, "2"], [1, True], [1, 2.0], [None], "12", None])
def test_ids_are_whole_numbers_and_nothing_else(ids: object) -> None:
    with pytest.raises(Corrupt, match=r"Answer\.output_ids"):
        decode(Answer, {**encode(ANSWER), "output_ids": ids})


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_what_is_no_object_is_no_record(value: object) -> None:
    with pytest.raises(Corrupt, match="expected an object"):
        decode(Segment, value)


def test_an_optional_field_may_be_null() -> None:
    @dataclass
    class Note:
        text: str | None

    assert decode(Note, {"text": None}) == Note(None)
    with pytest.raises(Corrupt):
        decode(Note, {"text": 3})


def test_records_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        COMMIT.batch = "other"  # type: ignore[misc]


def test_a_target_is_known_by_its_content_and_not_by_its_name() -> None:
    others = [
        replace(TARGET, config_sha256="x"),
        replace(TARGET, tokenizer_sha256="x"),
        replace(TARGET, template_sha256="x"),
        replace(TARGET, weights_sha256="x"),
        replace(TARGET, vocab_size=513),
        replace(TARGET, context_len=4097),
        replace(TARGET, dtype="float16"),
    ]

    assert replace(TARGET, name="other").fingerprint() == TARGET.fingerprint()
    assert len({t.fingerprint() for t in [TARGET, *others]}) == 8


def test_reading_records_loads_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; import dflash_workers.contract.records, dflash_workers.contract.keys;"
        "print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    )

    loaded = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True
    ).stdout

    assert loaded.strip() == "['__main__', 'dflash_workers']"
