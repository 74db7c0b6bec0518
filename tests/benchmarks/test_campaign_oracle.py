"""The oracle of campaigns: what it takes for whole, and each thing that it must find."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import Any

import orjson
import pyarrow as pa
import pytest
import zstandard
from tokenizers import Tokenizer

from benchmarks.campaign.oracle import BatchObjects, Oracle
from benchmarks.campaign.prompts import Source
from benchmarks.simulated.answers import Answers
from benchmarks.simulated.lengths import Lengths
from tests.tiny_model import make_tiny_model

MAX_TOKENS = 50
SOURCE = Source(seed=5, num_bytes=200, two_turns=0.3)
COLUMNS = ("id", "turn", "input_ids", "loss_mask")

Facts = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """What engines with it say, and how it reads."""

    answers: Answers
    tokenizer: Tokenizer

    def oracle(self, num_planned: int) -> Oracle:
        return Oracle(SOURCE, num_planned, self.answers, self.tokenizer, MAX_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    model_dir = make_tiny_model(tmp_path_factory.mktemp("model"))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return Model(Answers(model_dir, Lengths(30.0, 1.0)), tokenizer)


def row_of(model: Model, number: int) -> Facts:
    messages: list[Facts] = []
    answered = []
    asked = ""
    for turn, text in enumerate(SOURCE.texts(number)):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        asked += f"<|im_start|>user\n{text}<|im_end|>\n"
        ids = model.tokenizer.encode(f"{asked}<|im_start|>assistant\n").ids
        told = model.answers.answer_of(ids)[:MAX_TOKENS]
        answered.append({"turn": turn, "input_ids": ids, "output_ids": told})
    return {"id": f"p{number}", "messages": messages, "answers": answered}


def shard_of(rows: list[Facts]) -> bytes:
    samples = [
        {
            "id": row["id"],
            "turn": answer["turn"],
            "input_ids": answer["input_ids"] + answer["output_ids"],
            "loss_mask": [False] * len(answer["input_ids"]) + [True] * len(answer["output_ids"]),
        }
        for row in rows
        for answer in row["answers"]
    ]
    table = pa.table({name: [sample[name] for sample in samples] for name in COLUMNS})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return sink.getvalue()


def batch_of(rows: list[Facts], shard: bytes | None, rejected: list[Facts]) -> BatchObjects:
    lines = b"".join(orjson.dumps(row) + b"\n" for row in rows)
    data = zstandard.ZstdCompressor().compress(lines)
    commit = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "num_rows": len(rows),
        "rejected": rejected,
    }
    return BatchObjects("000000/b", commit, data, shard)


def test_a_run_in_which_all_is_right_is_whole(model: Model) -> None:
    oracle = model.oracle(21)
    rows = [row_of(model, number) for number in range(20)]
    rejected = [{"id": "p20", "reason": "loop"}]

    questions = oracle.look_at(batch_of(rows, shard_of(rows), rejected), has_tokenizers=True)

    found = oracle.looked
    assert (found.num_completed, found.num_rejected, found.num_lost, found.num_doubled) == (
        *(20, 1),
        *(0, 0),
    )
    assert (found.num_wrong, found.findings, found.num_not_tokenized) == (0, [], 0)
    num_answers = sum(len(row["answers"]) for row in rows)
    assert len(set(questions)) == found.num_token_rows == num_answers > 20
    assert found.num_output_tokens == sum(
        len(answer["output_ids"]) for row in rows for answer in row["answers"]
    )


def test_what_is_missing_is_lost_and_what_came_twice_is_doubled(model: Model) -> None:
    oracle = model.oracle(4)
    rows = [row_of(model, number) for number in (0, 1, 1)]

    oracle.look_at(batch_of(rows, None, [{"id": "p0", "reason": "x"}]), has_tokenizers=True)

    found = oracle.looked
    assert (found.num_completed, found.num_lost, found.num_doubled) == (0, 2, 2)
    assert found.num_not_tokenized == 1


@pytest.mark.parametrize(
    "what", ["ids", "message", "turns", "swapped", "sample", "mask", "stranger"]
)
def test_whatever_is_not_what_was_planned_or_sampled_is_found(model: Model, what: str) -> None:
    oracle = model.oracle(3)
    rows = [row_of(model, number) for number in range(3)]
    shard = shard_of(rows)
    if what == "ids":
        rows[1]["answers"][0]["output_ids"][-1] += 1
        shard = shard_of(rows)
    elif what == "message":
        rows[1]["messages"][0]["content"] += "."
    elif what == "turns":
        rows[1]["answers"].append(rows[1]["answers"][0])
        shard = shard_of(rows)
    elif what == "swapped":
        rows[0]["answers"], rows[1]["answers"] = rows[1]["answers"], rows[0]["answers"]
        shard = shard_of(rows)
    elif what == "stranger":
        rows[1]["id"] = "p77"
        shard = shard_of(rows)
    elif what == "sample":
        rows[2]["answers"][0]["input_ids"].insert(0, 3)
        rows[2]["answers"][0]["output_ids"] = model.answers.answer_of(
            rows[2]["answers"][0]["input_ids"]
        )[:MAX_TOKENS]
    else:
        shard = shard.replace(shard, shard_of([*rows[:2], {**rows[2], "answers": []}]))

    oracle.look_at(batch_of(rows, shard, []), has_tokenizers=True)

    assert oracle.looked.findings


def test_bytes_that_are_not_their_commits_are_found(model: Model) -> None:
    oracle = model.oracle(1)
    batch = batch_of([row_of(model, 0)], None, [])
    batch.commit["sha256"] = "0" * 64

    oracle.look_at(batch, has_tokenizers=False)

    assert "sha256" in oracle.looked.findings[0]
