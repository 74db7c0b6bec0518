"""A run that grows while it is trained on: planned, tokenized shard by shard, then sealed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dflash_workers.contract.chat import tokenizer_sha256
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    PlannedBatch,
    RunSpec,
    Sampling,
    Segment,
    Target,
)
from dflash_workers.contract.store import Store
from dflash_workers.contract.weights import weights_sha256
from trainer.tokens.shards import Sample, Source, write_shard

TEMPLATE = "{{ messages }}"
SPEC = RunSpec(
    schema=SCHEMA_VERSION,
    run="growing",
    target=Target(
        *("tiny", "c" * 64, "k" * 64, hashlib.sha256(TEMPLATE.encode()).hexdigest(), "w" * 64),
        *(512, 512, "float32"),
    ),
    chat_template=TEMPLATE,
    template_kwargs={},
    sampling=Sampling(0.0, 1.0, -1, 64, [2]),
    multi_turn="rollout",
    control_tokens="escape",
)


def samples_of(shard: int, num: int = 8, *, answer_len: int = 20) -> list[Sample]:
    """Samples of random ids and lengths, unlike those of any other shard; they train."""
    random = np.random.default_rng([11, shard])
    samples = []
    for i in range(num):
        prompt_len = int(random.integers(3, 12))
        length = prompt_len + int(random.integers(answer_len // 2, answer_len + 1))
        ids = random.integers(3, 500, length).astype(np.int32)
        key = f"{shard:016x}{i:016x}"
        samples.append(Sample(key, f"s{shard}.{i}", 0, ids, prompt_len, -1, False, "length", []))
    return samples


class GrowingRun:
    """One run in a store. Batches are planned from the start; their shards come one by one."""

    def __init__(self, store: Store, num_batches: int, spec: RunSpec = SPEC) -> None:
        self.store = store
        self.spec = spec
        self.keys = RunKeys(spec.run)
        self._num_segments = 0
        store.put_new(self.keys.spec, dump(spec))
        self._put_segment([f"b{i:03d}" for i in range(num_batches)], sealed=False)

    def seal(self) -> None:
        """No more batches will be planned."""
        self._put_segment([], sealed=True)

    def key(self, number: int) -> str:
        """Of a batch's shard."""
        return self.keys.shard(0, f"b{number:03d}")

    def put(
        self, number: int, samples: Sequence[Sample] | None = None, **changes: object
    ) -> list[Sample]:
        """A batch's shard; `changes`: of its Source."""
        source = Source(
            road="ids",
            run=self.spec.run,
            commit_key=self.keys.commit(0, f"b{number:03d}"),
            data_sha256="d" * 64,
            target_fingerprint=self.spec.target.fingerprint(),
            tokenizer_sha256=self.spec.target.tokenizer_sha256,
            template_sha256=self.spec.target.template_sha256,
            vocab_size=self.spec.target.vocab_size,
            stop_token_ids=self.spec.sampling.stop_token_ids,
            tool_version="0",
            skipped={},
        )
        source.update(changes)  # type: ignore[typeddict-item]
        samples = samples_of(number) if samples is None else list(samples)
        self.store.put_new(self.key(number), write_shard(samples, source))
        return samples

    def quarantine(self, number: int) -> None:
        """A batch of which no shard can be made."""
        self.store.put_new(self.keys.quarantine(0, f"b{number:03d}"), b'{"error": "corrupt"}')

    def damage(self, number: int) -> None:
        """Other bytes in a shard's place, as only an accident makes them."""
        body = bytearray(self.store.get(self.key(number)))
        body[len(body) // 2] ^= 0xFF
        self.store.replace(self.key(number), bytes(body))

    def _put_segment(self, batches: Sequence[str], *, sealed: bool) -> None:
        planned = [PlannedBatch(b, [f"{i:032x}" for i in range(8)], [], [], 0, 0) for b in batches]
        number, self._num_segments = self._num_segments, self._num_segments + 1
        segment = Segment(SCHEMA_VERSION, number, planned, [], 8 * len(planned), 0, 0, sealed)
        self.store.put_new(self.keys.segment(number), dump(segment))


def spec_of(model_dir: Path) -> RunSpec:
    """The spec of a run whose target lies in a folder."""
    target = replace(
        SPEC.target,
        config_sha256=hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest(),
        tokenizer_sha256=tokenizer_sha256(str(model_dir)),
        weights_sha256=weights_sha256(model_dir),
    )
    return replace(SPEC, target=target)


def renamed(spec: RunSpec, run: str) -> RunSpec:
    """The spec of another run."""
    return replace(spec, run=run)
