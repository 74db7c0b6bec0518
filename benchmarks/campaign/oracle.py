"""What stands in S3 against what was planned, read without a line of the product's.

Plain boto3, zstandard, orjson, tokenizers and pyarrow; the plan is known from prompts.py, the
answers from the engines' own function of what was asked, and what was asked is read as text again.
Batch by batch, so that any number of prompts is looked through in flat memory: what is kept of a
prompt is one byte. Called by conclude.py when all is over.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import boto3
import botocore.config
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import zstandard
from tokenizers import Tokenizer

from benchmarks.campaign.prompts import Source, number_of
from benchmarks.simulated.answers import HEADER, Answers

NUM_READERS = 4
MAX_FINDINGS = 30
REJECTED = 1 << 6  # in a prompt's byte; below it stands how often it was completed
SAID = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)  # in what was asked
FLEET_PREFIX = "campaign"  # see fleet.py: kept apart, so that a wrong prefix there is found here

Facts = dict[str, Any]

_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the objects of a run lie."""

    endpoint: str
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    bucket: str
    run: str


@dataclass(frozen=True, slots=True)
class BatchObjects:
    """What one batch left: its commit, the bytes that this names, its shard if there is one."""

    name: str  # "<segment>/<batch>"
    commit: Facts
    data: bytes
    shard: bytes | None


@dataclass
class Looked:
    """What was found. `fates` has a byte for each planned prompt."""

    fates: bytearray
    num_batches: int = 0
    num_wrong: int = 0
    num_output_tokens: int = 0
    num_token_rows: int = 0
    num_not_tokenized: int = 0  # batches
    findings: list[str] = field(default_factory=list)

    def find(self, text: str) -> None:
        """Note it, unless there are many already."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(text)

    def count(self, *, completed: int, rejected: bool) -> int:
        """Prompts with exactly such a fate."""
        return self.fates.count(completed + REJECTED * rejected)

    @property
    def num_lost(self) -> int:
        return self.fates.count(0)

    @property
    def num_completed(self) -> int:
        return self.count(completed=1, rejected=False)

    @property
    def num_rejected(self) -> int:
        return self.count(completed=0, rejected=True)

    @property
    def num_doubled(self) -> int:
        return len(self.fates) - self.num_lost - self.num_completed - self.num_rejected


class Oracle:
    """Of one run."""

    def __init__(
        self,
        source: Source,
        num_planned: int,
        answers: Answers,
        tokenizer: Tokenizer,
        max_tokens: int,
    ) -> None:
        self.looked = Looked(bytearray(num_planned))
        self._source = source
        self._answers = answers
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def look_at(self, batch: BatchObjects, *, has_tokenizers: bool) -> list[str]:
        """Take a batch in; return the names of the questions that its answers are of."""
        looked = self.looked
        looked.num_batches += 1
        if hashlib.sha256(batch.data).hexdigest() != batch.commit["sha256"]:
            looked.find(f"{batch.name}: its data's sha256 is not its commit's")
        for rejection in batch.commit["rejected"]:
            self._settle(rejection["id"], REJECTED)
        rows = [orjson.loads(line) for line in _lines(batch.data)]
        if len(rows) != batch.commit["num_rows"]:
            looked.find(f"{batch.name}: {len(rows)} rows are not those of its commit")
        questions = []
        for row in rows:
            self._settle(row["id"], 1)
            self._check_questions(row)
            for answer in row["answers"]:
                questions.append(self._check_answer(row["id"], answer))
        if batch.shard is not None:
            self._check_shard(batch, rows)
        elif has_tokenizers:
            looked.num_not_tokenized += 1
        return questions

    def _settle(self, prompt_id: str, fate: int) -> None:
        number = number_of(prompt_id)
        if number is None or number >= len(self.looked.fates):
            self.looked.find(f"{prompt_id}: was never planned")
        elif self.looked.fates[number] & ~REJECTED < REJECTED - 1:
            self.looked.fates[number] += fate

    def _check_questions(self, row: Facts) -> None:
        """A turn for each text that was planned, asked with this one and those before it."""
        number = number_of(row["id"])
        planned = [] if number is None else self._source.texts(number)
        said = [message["content"] for message in row["messages"] if message["role"] == "user"]
        if said != planned:
            self._wrong(f"{row['id']}: its messages are not what was planned")
        if [answer["turn"] for answer in row["answers"]] != list(range(len(planned))):
            self._wrong(f"{row['id']}: {len(row['answers'])} answers to {len(planned)} turns")
        for answer in row["answers"]:
            asked = self._tokenizer.decode(answer["input_ids"], skip_special_tokens=False)
            if SAID.findall(asked) != planned[: answer["turn"] + 1] or not asked.endswith(HEADER):
                self._wrong(f"{row['id']}, turn {answer['turn']}: asked something else")

    def _check_answer(self, prompt_id: str, answer: Facts) -> str:
        ids = answer["output_ids"]
        self.looked.num_output_tokens += len(ids)
        if ids != self._answers.answer_of(answer["input_ids"])[: self._max_tokens]:
            self._wrong(f"{prompt_id}, turn {answer['turn']}: not what the engine says")
        return self._answers.question_of(answer["input_ids"]).name

    def _check_shard(self, batch: BatchObjects, rows: list[Facts]) -> None:
        """A sample for each answer: its prompt's ids and its own, the loss on the latter alone."""
        assert batch.shard is not None
        wanted = {
            (row["id"], answer["turn"]): (answer["input_ids"], answer["output_ids"])
            for row in rows
            for answer in row["answers"]
        }
        samples = pa.ipc.open_file(io.BytesIO(batch.shard)).read_all()
        self.looked.num_token_rows += samples.num_rows
        if samples.num_rows != len(wanted):
            self.looked.find(f"{batch.name}: {samples.num_rows} samples of {len(wanted)} answers")
        keys = list(zip(samples["id"].to_pylist(), samples["turn"].to_pylist(), strict=True))
        pieces = [wanted.get(key, ([], [])) for key in keys]
        ids = [np.asarray(asked + answered, np.int32) for asked, answered in pieces]
        masks = [np.repeat([False, True], [len(asked), len(told)]) for asked, told in pieces]
        is_right = set(keys) == set(wanted)
        is_right &= np.array_equal(_flat(samples["input_ids"]), np.concatenate([*ids, _NONE]))
        is_right &= np.array_equal(_flat(samples["loss_mask"]), np.concatenate([*masks, _NONE]))
        if not is_right:
            self._wrong(f"{batch.name}: its samples are not its answers")

    def _wrong(self, text: str) -> None:
        self.looked.num_wrong += 1
        self.looked.find(text)


def _flat(column: Any) -> npt.NDArray[Any]:
    """All values of a column of lists, one list after the other."""
    return np.concatenate(
        [_NONE, *(c.flatten().to_numpy(zero_copy_only=False) for c in column.chunks)]
    )


def read_batches(where: Bucket) -> Iterator[BatchObjects]:
    """Every committed batch of a run, a few of them at once."""
    config = botocore.config.Config(max_pool_connections=2 * NUM_READERS)
    client = boto3.client(
        "s3",
        endpoint_url=where.endpoint,
        aws_access_key_id=where.access_key,
        aws_secret_access_key=where.secret_key,
        region_name="us-east-1",
        config=config,
    )
    pending: deque[Future[BatchObjects]] = deque()
    with ThreadPoolExecutor(NUM_READERS) as readers:
        for key in _keys(client, where, "commits/"):
            pending.append(readers.submit(_read, client, where, key))
            if len(pending) > 4 * NUM_READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    client.close()


def _read(client: Any, where: Bucket, key: str) -> BatchObjects:
    name = key.partition("/commits/")[2].removesuffix(".json")
    commit = orjson.loads(_get(client, where, key))
    data = _get(client, where, f"{FLEET_PREFIX}/{commit['data_key']}")
    try:
        shard = _get(client, where, f"{FLEET_PREFIX}/{where.run}/tokens/v1/{name}.arrow")
    except client.exceptions.NoSuchKey:
        shard = None
    return BatchObjects(name, commit, data, shard)


def _get(client: Any, where: Bucket, key: str) -> bytes:
    return bytes(client.get_object(Bucket=where.bucket, Key=key)["Body"].read())


def _keys(client: Any, where: Bucket, folder: str) -> Iterator[str]:
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=where.bucket, Prefix=f"{FLEET_PREFIX}/{where.run}/{folder}"
    )
    for page in pages:
        for item in page.get("Contents", []):
            yield item["Key"]


def _lines(data: bytes) -> list[bytes]:
    text = zstandard.ZstdDecompressor().decompress(data)
    return [line for line in text.split(b"\n") if line]
