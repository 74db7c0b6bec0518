"""A run as S3 and Redis hold it, planned and committed by hand.

What reads plans and commits is judged on these, without the producer's own planning.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import celeryconfig
from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress, dump, dump_lines
from dflash_workers.contract.plan import read_prompts, read_segments
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    BatchMessage,
    Commit,
    PlannedBatch,
    Prompt,
    Refusal,
    Rejection,
    Row,
    RunSpec,
    Sampling,
    Segment,
    Target,
    Turn,
)
from dflash_workers.contract.store import Store

NO_BATCH = Segment(SCHEMA_VERSION, 0, [], [], 0, 0, 0, sealed=False)


def spec_of(run: str) -> RunSpec:
    """A run whose target, and so whose queue, is nobody else's."""
    target = Target("tiny", "c", "t", "t", uuid.uuid4().hex, 512, 4096, "float32")
    return RunSpec(
        schema=SCHEMA_VERSION,
        run=run,
        target=target,
        chat_template="",
        template_kwargs={},
        sampling=Sampling(0.7, 0.95, 20, 64, [2]),
        multi_turn="rollout",
        control_tokens="escape",
    )


def prompts(*ids: str, **facts: Any) -> list[Prompt]:
    """One question per id."""
    return [
        Prompt(
            **{
                "key": hashlib.sha256(name.encode()).hexdigest()[:32],
                "id": name,
                "turns": [Turn([{"role": "user", "content": f"question {name}"}])],
                "tools": [],
                "heldout": False,
                "source": f"rows.jsonl:{number}",
                **facts,
            }
        )
        for number, name in enumerate(ids, start=1)
    ]


@dataclass
class Campaign:
    """Plans segments and commits batches."""

    store: Store
    hints: Hints
    spec: RunSpec
    num_segments: int = 0

    @property
    def run(self) -> str:
        return self.spec.run

    @property
    def queue(self) -> str:
        return celeryconfig.generate_queue(self.spec.target.fingerprint())

    def plan(
        self, *batches: list[Prompt], refusals: tuple[Refusal, ...] = (), **facts: Any
    ) -> list[BatchMessage]:
        """A segment; `facts` are fields of it that are to be otherwise."""
        keys, number = RunKeys(self.run), self.num_segments
        self.num_segments += 1
        self.store.put_new(keys.spec, dump(self.spec))
        planned, body = [], b""
        for batch in batches:
            frame = compress(dump_lines(batch))
            planned.append(_planned(batch, len(body), len(frame)))
            body += frame
        segment = replace(
            NO_BATCH,
            number=number,
            batches=planned,
            num_rows=sum(map(len, batches)) + len(refusals),
            num_refused=len(refusals),
        )
        if batches:
            segment = replace(segment, prompts=keys.prompts(number, uuid.uuid4().hex[:16]))
            self.store.put_new(segment.prompts, body)
        if refusals:
            segment = replace(segment, refusals=keys.refusals(number, uuid.uuid4().hex[:16]))
            self.store.put_new(segment.refusals, compress(dump_lines(refusals)))
        self.store.put_new(keys.segment(number), dump(replace(segment, **facts)))
        return [BatchMessage(self.run, number, batch.batch) for batch in planned]

    def commit(
        self, message: BatchMessage, rejected: Mapping[str, str] | None = None, **facts: Any
    ) -> Commit:
        """A worker's part: answers every prompt, but rejects those named, each for its reason."""
        rejected = rejected or {}
        planned = self._prompts_of(message)
        rows = [_row(prompt) for prompt in planned if prompt.id not in rejected]
        body, sha256 = seal_rows(rows)
        commit = Commit(
            schema=SCHEMA_VERSION,
            run=message.run,
            segment=message.segment,
            batch=message.batch,
            attempt="attempt",
            data_key=RunKeys(message.run).data(message.segment, message.batch, "attempt"),
            sha256=sha256,
            data_bytes=len(body),
            num_rows=len(rows),
            rejected=[
                Rejection(p.key, p.id, rejected[p.id], "why") for p in planned if p.id in rejected
            ],
            input_tokens=2 * len(rows),
            output_tokens=3 * len(rows),
            started_at=0.0,
            finished_at=0.0,
            worker="test",
            engine={},
        )
        return publish(self.store, replace(commit, **facts), body)

    def _prompts_of(self, message: BatchMessage) -> list[Prompt]:
        segment = next(read_segments(self.store, message.run, message.segment))
        batch = next(b for b in segment.batches if b.batch == message.batch)
        return read_prompts(self.store, segment, batch)


def _planned(batch: list[Prompt], offset: int, num_bytes: int) -> PlannedBatch:
    return PlannedBatch(
        batch=hashlib.sha256(dump_lines(batch)).hexdigest()[:24],
        prompt_keys=[prompt.key for prompt in batch],
        content_digests=[prompt.key for prompt in batch],
        line_digests=["" for _ in batch],
        offset=offset,
        num_bytes=num_bytes,
        generation=batch[0].generation,
        sampling=batch[0].sampling,
    )


def _row(prompt: Prompt) -> Row:
    answer = Answer(0, [5, 6], [7, 8, 2], [3], "fine", "", [], "stop", 0, 0.1, 1)
    return Row(
        key=prompt.key,
        id=prompt.id,
        generation=prompt.generation,
        heldout=prompt.heldout,
        source=prompt.source,
        messages=[*prompt.turns[0].messages, {"role": "assistant", "content": "fine"}],
        tools=prompt.tools,
        answers=[answer],
    )


def requests_of(store: Store) -> list[str]:
    """The operations that S3 is asked for from now on, pages and attempts one by one."""
    asked: list[str] = []
    store.client.meta.events.register(
        "before-send.s3", lambda event_name, **_: asked.append(event_name.rpartition(".")[2])
    )
    return asked
