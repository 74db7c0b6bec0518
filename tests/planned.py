"""Prompts and plans as a producer would write them, without the producer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import celeryconfig
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump, dump_lines
from dflash_workers.contract.records import (
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
        messages = []
        for prompts in batches:
            batch = hashlib.sha256(dump_lines(prompts)).hexdigest()[:16]
            self.store.put_new(keys.prompts(number, batch), dump_lines(prompts))
            messages.append(BatchMessage(self.spec.run, number, batch))
        planned = [
            PlannedBatch(message.batch, [p.key for p in prompts], ["x" for _ in prompts])
            for message, prompts in zip(messages, batches, strict=True)
        ]
        num_rows = sum(map(len, batches))
        segment = Segment(1, number, planned, ["test"], num_rows, 0, 0, sealed=sealed)
        self.store.put_new(keys.segment(number), dump(segment))
        return messages

    @property
    def queue(self) -> str:
        return celeryconfig.generate_queue(self.spec.target.fingerprint())
