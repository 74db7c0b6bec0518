"""Shards: what is written is read back by us and by strangers, and nothing else is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_workers.contract.errors import Corrupt
from trainer.tokens import shards
from trainer.tokens.shards import (
    Quarantined,
    Sample,
    Source,
    read_provenance,
    read_quarantined,
    read_shard,
    write_shard,
)

STOP, OTHER_STOP, VOCAB_SIZE = 2, 0, 1000

SOURCE = Source(
    road="ids",
    run="run",
    commit_key="run/commits/000001/b.json",
    data_sha256="d" * 64,
    target_fingerprint="f" * 64,
    tokenizer_sha256="t" * 64,
    template_sha256="c" * 64,
    vocab_size=VOCAB_SIZE,
    stop_token_ids=[STOP, OTHER_STOP],
    tool_version="0",
    skipped={"empty": 3},
)


def make_sample(prompt: list[int], answer: list[int], finish_reason: str = "stop") -> Sample:
    return Sample(
        prompt_key="a" * 32,
        id="math-1",
        turn=0,
        ids=np.array(prompt + answer, dtype=np.int32),
        prompt_len=len(prompt),
        thinking_end=-1,
        heldout=False,
        finish_reason=finish_reason,
    )


GOOD = make_sample([5, 6, 7], [8, 9, STOP])

ids = st.lists(st.integers(min_value=3, max_value=VOCAB_SIZE - 1), min_size=1, max_size=40)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    ended = draw(st.booleans())
    answer = draw(ids) + [draw(st.sampled_from([STOP, OTHER_STOP]))] * ended
    sample = make_sample(draw(ids), answer, "stop" if ended else "length")
    return replace(
        sample,
        prompt_key=draw(st.text("0123456789abcdef", min_size=32, max_size=32)),
        id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=12)),
        turn=draw(st.integers(0, 9)),
        heldout=draw(st.booleans()),
        thinking_end=draw(st.sampled_from([-1, sample.prompt_len])),
        flags=draw(st.lists(st.sampled_from(["truncated", "tool_rounds"]), max_size=2)),
    )


def facts(sample: Sample) -> list[object]:
    rest = [sample.prompt_key, sample.id, sample.turn, sample.prompt_len, sample.thinking_end]
    return [*rest, sample.heldout, sample.finish_reason, sample.flags, sample.ids.tolist()]


@settings(deadline=None, max_examples=50)
@given(st.lists(samples(), max_size=6))
def test_what_is_written_is_read_back(written: list[Sample]) -> None:
    body = write_shard(written, SOURCE)

    read = read_shard(body)

    assert [facts(s) for s in read] == [facts(s) for s in written]
    assert all(s.ids.dtype == np.int32 for s in read)


@settings(deadline=None, max_examples=50)
@given(st.lists(samples(), max_size=6))
def test_the_metadata_counts_what_the_columns_hold(written: list[Sample]) -> None:
    body = write_shard(written, SOURCE)

    rows = pa.ipc.open_file(body).read_all().to_pylist()
    provenance = read_provenance(body)

    assert provenance["num_samples"] == len(rows)
    assert provenance["num_tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert provenance["num_loss_tokens"] == sum(sum(row["loss_mask"]) for row in rows)
    assert {name: provenance[name] for name in SOURCE} == SOURCE  # type: ignore[literal-required]


def test_the_same_samples_always_have_the_same_content_hash() -> None:
    once, again = write_shard([GOOD], SOURCE), write_shard([GOOD], {**SOURCE, "tool_version": "9"})

    hashes = {read_provenance(body)["content_sha256"] for body in (once, again)}

    # Golden: another value would mean that every shard of every run reads as corrupt.
    assert hashes == {"9bf294850fc24798dead6e0d7c4ab25c9610135c6cb65ff157f0fe479a6a80be"}


@pytest.mark.parametrize(
    "other",
    [
        replace(GOOD, id="math-2"),
        replace(GOOD, turn=1),
        replace(GOOD, heldout=True),
        replace(GOOD, prompt_len=2),
        replace(GOOD, thinking_end=4),
        replace(GOOD, flags=["truncated"]),
        make_sample([5, 6, 7], [8, 10, STOP]),
    ],
)
def test_any_change_of_a_sample_changes_the_content_hash(other: Sample) -> None:
    hashes = {read_provenance(write_shard([s], SOURCE))["content_sha256"] for s in (GOOD, other)}

    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (make_sample([5, 6], []), "2 ids with a prompt of 2"),
        (replace(GOOD, prompt_len=9), "6 ids with a prompt of 9"),
        (make_sample([], [8, STOP]), "2 ids with a prompt of 0"),
        (make_sample([5], [VOCAB_SIZE, STOP]), "outside the vocabulary"),
        (make_sample([-1], [8, STOP]), "outside the vocabulary"),
        (make_sample([5], [8, 9], "stop"), "finished by 'stop'"),
        (make_sample([5], [8, STOP], "length"), "finished by 'length'"),
        (replace(GOOD, thinking_end=1), "thinking ends at 1"),
        (replace(GOOD, thinking_end=6), "thinking ends at 6"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_never_written(bad: Sample, complaint: str) -> None:
    with pytest.raises(Corrupt, match=complaint):
        write_shard([GOOD, bad], SOURCE)


def test_a_damaged_shard_is_corrupt_or_reads_as_it_was() -> None:
    written = [GOOD, make_sample([9] * 50, [8] * 60, "length")]
    body = write_shard(written, SOURCE)

    outcomes: set[object] = set()
    for position in range(0, len(body), 3):
        damaged = bytearray(body)
        damaged[position] ^= 1 << position % 8
        try:
            read = read_shard(bytes(damaged))
            outcomes.add([facts(s) for s in read] == [facts(s) for s in written])
        except Corrupt:
            outcomes.add("corrupt")

    assert outcomes == {True, "corrupt"}


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_shard_cut_short_is_corrupt(length: int) -> None:
    body = write_shard([GOOD], SOURCE)

    with pytest.raises(Corrupt):
        read_shard(body[:length])


def test_an_arrow_file_of_another_schema_is_corrupt() -> None:
    schema = pa.schema({"text": pa.string()}, metadata={b"dflash": orjson.dumps({})})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_batch(pa.RecordBatch.from_pydict({"text": ["hi"]}, schema=schema))

    with pytest.raises(Corrupt, match="another schema"):
        read_shard(sink.getvalue().to_pybytes())


def test_a_mask_that_lights_up_in_the_prompt_is_corrupt() -> None:
    table = pa.ipc.open_file(write_shard([GOOD], SOURCE)).read_all()
    lit = pa.array([[True] * 6], pa.list_(pa.bool_()))
    table = table.set_column(4, "loss_mask", lit).replace_schema_metadata(table.schema.metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)

    with pytest.raises(Corrupt, match="mask differs"):
        read_shard(sink.getvalue().to_pybytes())


def test_ids_take_four_bytes_and_the_mask_one_bit() -> None:
    sample = make_sample([5] * 4000, [8] * 4000, "length")

    table = pa.ipc.open_file(write_shard([sample], SOURCE)).read_all()

    ids, mask = (pc.list_flatten(table[name]).nbytes for name in ("input_ids", "loss_mask"))
    assert (ids, mask) == (8000 * 4, 8000 // 8)


def test_datasets_reads_a_shard_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = pytest.importorskip("datasets")
    truncated = make_sample([4], [8, 9], "length")
    path = tmp_path / "b.arrow"
    path.write_bytes(write_shard([GOOD, truncated], SOURCE))

    data = datasets.load_dataset(
        "arrow", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
    )

    assert data["input_ids"][:] == [[5, 6, 7, 8, 9, STOP], [4, 8, 9]]
    assert data["loss_mask"][:] == [[False] * 3 + [True] * 3, [False, True, True]]
    assert data["finish_reason"][:] == ["stop", "length"]


def test_no_record_batch_is_larger_than_a_reader_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """List offsets are 32 bit: by itself Arrow would overflow at 2^31 ids."""
    monkeypatch.setattr(shards, "MAX_BATCH_IDS", 100)
    lengths = [60, 60, 30, 10, 250, 1, 99, 1]
    written = [make_sample([5], [8] * (n - 1), "length") for n in lengths if n > 1]

    body = write_shard(written, SOURCE)

    file = pa.ipc.open_file(body)
    held = [
        pc.list_value_length(file.get_batch(n).column("input_ids")).to_pylist()
        for n in range(file.num_record_batches)
    ]
    assert held == [[60], [60, 30, 10], [250], [99]]
    assert [facts(s) for s in read_shard(body)] == [facts(s) for s in written]


def test_a_reader_slices_a_batch_as_it_likes() -> None:
    """The mask of rows that don't begin where their buffers do."""
    table = pa.ipc.open_file(write_shard([GOOD, GOOD, GOOD], SOURCE)).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table.slice(0, 1))
        file.write_table(table.slice(1, 2))

    assert len(read_shard(sink.getvalue().to_pybytes())) == 3


def test_what_is_left_out_is_said_beside_the_samples() -> None:
    left_out = Quarantined(id="math-7", reason="no_stop_id", detail="turn 0")

    body = write_shard([GOOD], SOURCE, [left_out])

    assert read_quarantined(body) == [left_out]
    assert read_quarantined(write_shard([GOOD], SOURCE)) == []
    assert len(read_shard(body)) == 1
