"""Prompts and plans as a producer would write them, without the producer."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

import celeryconfig
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import compress, dump, dump_lines
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    BatchMessage,
    PlannedBatch,
    Prompt,
    RunSpec,
    Segment,
    Turn,
)
from dflash_workers.contract.store import Store

DEFAULTS: dict[str, Any] = {"heldout": False, "source": "test:1"}


def prompt(*messages: str, **fields: Any) -> Prompt:
    """One user turn per message."""
    key = hashlib.sha256("|".join(messages).encode()).hexdigest()[:32]
    turns = [Turn([{"role": "user", "content": message}]) for message in messages]
    return Prompt(
        **({"key": key, "id": messages[0], "turns": turns, "tools": []} | DEFAULTS | fields)
    )


@dataclass
class Plan:
    """Writes a run's plan as a producer would."""

    store: Store
    hints: Hints
    spec: RunSpec
    num_segments: int = 0

    def add(self, *batches: list[Prompt], sealed: bool = False) -> list[BatchMessage]:
        keys, number = RunKeys(self.spec.run), self.num_segments
        self.num_segments += 1
        self.store.put_new(keys.spec, dump(self.spec))
        planned, frames, at = [], [], 0
        for prompts in batches:
            frame = compress(dump_lines(prompts))
            digests = ["x" for _ in prompts]
            batch = hashlib.sha256(dump_lines(prompts)).hexdigest()[:16]
            keys_of = [p.key for p in prompts]
            generation = prompts[0].generation
            planned.append(
                PlannedBatch(batch, keys_of, digests, digests, at, len(frame), generation)
            )
            frames.append(frame)
            at += len(frame)
        prompts_key = keys.prompts(number, uuid.uuid4().hex[:16])
        self.store.put_new(prompts_key, b"".join(frames))
        segment = Segment(
            schema=SCHEMA_VERSION,
            number=number,
            batches=planned,
            sources=["test"],
            num_rows=sum(map(len, batches)),
            num_refused=0,
            num_duplicates=0,
            sealed=sealed,
            prompts=prompts_key,
        )
        self.store.put_new(keys.segment(number), dump(segment))
        return [BatchMessage(self.spec.run, number, batch.batch) for batch in planned]

    @property
    def queue(self) -> str:
        return celeryconfig.generate_queue(self.spec.target.fingerprint())
