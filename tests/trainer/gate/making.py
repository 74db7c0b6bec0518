"""Shards as the gate reads them, made by hand: samples, rows, and runs of them in a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import dump
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    Json,
    PlannedBatch,
    Row,
    RunSpec,
    Sampling,
    Segment,
    Target,
)
from dflash_workers.contract.store import Store
from trainer.gate.reading import ReadShard, Words
from trainer.tokens.shards import Provenance, Sample, Source, write_shard

RUN = "run"
STOP, VOCAB_SIZE = 2, 500
TOKENIZER = "k" * 64
PROMPT_LEN = 10

SPEC = RunSpec(
    schema=SCHEMA_VERSION,
    run=RUN,
    target=Target("tiny", "c" * 64, TOKENIZER, "m" * 64, "w" * 64, VOCAB_SIZE, 4096, "float32"),
    chat_template="",
    template_kwargs={},
    sampling=Sampling(0.0, 1.0, -1, 2048, [STOP]),
    multi_turn="rollout",
    control_tokens="escape",
)
THINKING_SPEC = replace(SPEC, template_kwargs={"enable_thinking": True})


def sample_of(
    number: int, answer: Sequence[int], *, thinking: int = -1, flags: Sequence[str] = ()
) -> Sample:
    """One whose answer is given. `thinking`: how many of its ids come before the thinking's end."""
    ids = [3 + number % 400] * PROMPT_LEN + list(answer)
    return Sample(
        prompt_key=f"{number:032x}",
        id=f"s{number}",
        turn=0,
        ids=np.array(ids, dtype=np.int32),
        prompt_len=PROMPT_LEN,
        thinking_end=-1 if thinking < 0 else PROMPT_LEN + thinking,
        heldout=False,
        finish_reason="stop" if answer[-1] == STOP else "length",
        flags=list(flags),
    )


def random_answer(number: int, length: int) -> list[int]:
    """That many ids and the stop id; unlike any other number's."""
    return [*np.random.default_rng([7, number]).integers(3, VOCAB_SIZE, length).tolist(), STOP]


def healthy(num: int, first: int = 0) -> list[Sample]:
    """Answers of 30 to 90 tokens that end by themselves and differ from each other."""
    return [sample_of(n, random_answer(n, 30 + n % 60)) for n in range(first, first + num)]


def words(content: str = "An answer.", source: str = "p.jsonl", **others: object) -> Words:
    facts: Json = {"asked": "", "reasoning": "", "num_tools": 0, "num_calls": 0, **others}
    return Words(source=source, content=content, **facts)


def source_of(skipped: dict[str, int] | None = None, tokenizer: str = TOKENIZER) -> Source:
    return Source(
        road="ids",
        run=RUN,
        commit_key="run/commits/000001/none.json",
        data_sha256="d" * 64,
        target_fingerprint="f" * 64,
        tokenizer_sha256=tokenizer,
        template_sha256="m" * 64,
        vocab_size=VOCAB_SIZE,
        stop_token_ids=[STOP],
        tool_version="0",
        skipped=skipped or {},
    )


def read_shard_of(
    samples: Sequence[Sample],
    said: Sequence[Words] = (),
    *,
    skipped: dict[str, int] | None = None,
    tokenizer: str = TOKENIZER,
) -> ReadShard:
    """As reading.py would give it, without a store."""
    provenance = Provenance(
        **source_of(skipped, tokenizer),
        num_samples=len(samples),
        num_tokens=0,
        num_loss_tokens=0,
        content_sha256="",
    )
    keys = [(s.prompt_key, s.turn) for s in samples]
    return ReadShard(provenance, list(samples), dict(zip(keys, said, strict=False)), 0)


def put_run(
    store: Store, shards: Sequence[Sequence[Sample]], *, spec: RunSpec = SPEC, **facts: object
) -> None:
    """A run with these shards; see source_of for `facts`."""
    store.put_new(RunKeys(RUN).spec, dump(spec))
    for number, samples in enumerate(shards):
        put_shard(store, number, samples, **facts)


def put_shard(store: Store, number: int, samples: Sequence[Sample], **facts: object) -> None:
    """One shard more."""
    source = source_of(**facts)  # type: ignore[arg-type]
    source["commit_key"] = RunKeys(RUN).commit(1, f"b{number:03d}")
    store.put_new(RunKeys(RUN).shard(1, f"b{number:03d}"), write_shard(samples, source))


def put_plan(store: Store, shards: Sequence[Sequence[Sample]]) -> None:
    """The plan that the shards of put_run come from."""
    batches = [
        PlannedBatch(f"b{number:03d}", [s.prompt_key for s in samples], [], [], 0, 0)
        for number, samples in enumerate(shards)
    ]
    for number, planned in enumerate(([], batches)):
        segment = Segment(SCHEMA_VERSION, number, planned, [], 0, 0, 0, sealed=True)
        store.put_new(RunKeys(RUN).segment(number), dump(segment))


def answer_of(sample: Sample, content: str, reasoning: str = "", calls: int = 0) -> Answer:
    """The answer that a sample was made of."""
    sampled = sample.ids[sample.prompt_len :].tolist()
    asked = sample.ids[: sample.prompt_len].tolist()
    return Answer(
        *(sample.turn, asked, sampled, [len(sampled)], content, reasoning, [{}] * calls),
        *(sample.finish_reason, 0, 0.1, 7, {}, sample.flags),
    )


def put_commit(store: Store, batch: str, rows: list[Row]) -> str:
    """The commit of these rows; its key."""
    body, sha256 = seal_rows(rows)
    keys = RunKeys(RUN)
    publish(
        store,
        Commit(
            *(SCHEMA_VERSION, RUN, 1, batch, "att", keys.data(1, batch, "att"), sha256),
            *(len(body), len(rows), [], 0, 0, 0.0, 1.0, "w", {}),
        ),
        body,
    )
    return keys.commit(1, batch)
