"""Commits -> token shards: one Arrow shard per commit, one sample per answer.

Reads runs' commits and the data that they name <- dflash_workers, writes tokens/<version>/ through
shards.py -> online/batches.py. Ids are taken as the engine was prompted and as it sampled; nothing
is tokenised here. A shard is a pure function of its commit, so that whoever is second finds his own
content; "done" means that the shard exists, also where no answer of the batch trains.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.errors import Conflict, Corrupt, Missing
from dflash_workers.contract.flags import (
    EMPTY,
    GARBLED,
    REPETITION,
    TOOL_CALL_LOOP,
    TRUNCATED,
    UNFINISHED_THINKING,
)
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import Answer, Commit, Row, RunSpec
from dflash_workers.contract.store import Store
from trainer.tokens.shards import (
    Provenance,
    Sample,
    Source,
    list_shards,
    read_provenance,
    write_shard,
)

TEXT_ROAD = "text_road"  # imported conversations: they have no ids yet

_UNFIT = (REPETITION, TOOL_CALL_LOOP, GARBLED)  # flags of answers that teach a drafter nothing


@dataclass(slots=True)
class TokenizeReport:
    """What a run's shards hold, those that were there before included."""

    num_shards: int = 0
    num_new: int = 0
    num_samples: int = 0
    num_loss_tokens: int = 0
    num_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # answers that do not train, by reason
    quarantined: list[str] = field(default_factory=list)  # "key: what is wrong with it"

    def add(self, provenance: Provenance) -> None:
        """Count one shard in."""
        self.num_shards += 1
        self.num_samples += provenance["num_samples"]
        self.num_loss_tokens += provenance["num_loss_tokens"]
        self.num_tokens += provenance["num_tokens"]
        self.skipped = dict(Counter(self.skipped) + Counter(provenance["skipped"]))

    def skip(self, reason: str, num_skipped: int) -> None:
        """Count what has no shard."""
        self.skipped[reason] = self.skipped.get(reason, 0) + num_skipped


def tokenize_run(
    store: Store, run: str, on_shard: Callable[[str], None] | None = None
) -> TokenizeReport:
    """Make the shard of every commit that has none. Safe to call again, or twice at once.

    `on_shard` hears the key of each shard made. What is corrupt or gone is quarantined: reported,
    and no other batch suffers from it.
    """
    keys = RunKeys(run)
    spec = load(RunSpec, store.get(keys.spec))
    existing = set(list_shards(store, run))
    report = TokenizeReport()
    for segment, batch in committed_batches(store, run):
        key = keys.shard(segment, batch)
        try:
            if key in existing:
                report.add(read_provenance(store.get(key)))
                continue
            commit = read_commit(store, run, segment, batch)
            if commit.road != "ids":
                report.skip(TEXT_ROAD, commit.num_rows)
                continue
            shard = build_shard(store, spec, commit)
            _put_shard(store, key, shard)
            report.add(read_provenance(shard))
        except (Corrupt, Missing) as error:
            report.quarantined.append(f"{key}: {error}")
            continue
        report.num_new += 1
        if on_shard:
            on_shard(key)
    return report


def build_shard(store: Store, spec: RunSpec, commit: Commit) -> bytes:
    """The shard of a commit. Raises Corrupt, Missing."""
    rows = read_rows(store, commit)
    reasons = (skip_reason(answer, spec) for row in rows for answer in row.answers)
    source = Source(
        road="ids",
        run=spec.run,
        commit_key=RunKeys(spec.run).commit(commit.segment, commit.batch),
        data_sha256=commit.sha256,
        target_fingerprint=spec.target.fingerprint(),
        tokenizer_sha256=spec.target.tokenizer_sha256,
        template_sha256=spec.target.template_sha256,
        vocab_size=spec.target.vocab_size,
        stop_token_ids=spec.sampling.stop_token_ids,
        tool_version=importlib.metadata.version("dflash-fleet"),
        skipped=dict(Counter(reason for reason in reasons if reason)),
    )
    return write_shard([sample for row in rows for sample in samples_of(row, spec)], source)


def samples_of(row: Row, spec: RunSpec) -> list[Sample]:
    """One sample per answer that trains. Raises Corrupt where an id is no 32-bit number."""
    return [_sample(row, a, spec) for a in row.answers if not skip_reason(a, spec)]


def skip_reason(answer: Answer, spec: RunSpec) -> str | None:
    """Why an answer does not train; None where it does."""
    sampled = answer.output_ids
    if not sampled or sampled[0] in spec.sampling.stop_token_ids:
        return EMPTY
    # Thinking that the limit cut off has no content yet, but it is the target's own text.
    if EMPTY in answer.flags and UNFINISHED_THINKING not in answer.flags:
        return EMPTY
    return next((flag for flag in _UNFIT if flag in answer.flags), None)


def _sample(row: Row, answer: Answer, spec: RunSpec) -> Sample:
    # An engine that reaches the limit by the stop id may say "length"; the ids know better.
    ended = answer.output_ids[-1] in spec.sampling.stop_token_ids
    try:
        ids = np.array([*answer.input_ids, *answer.output_ids], dtype=np.int32)
    except OverflowError as error:
        raise Corrupt(f"prompt {row.id!r}, turn {answer.turn}: {error}") from error
    return Sample(
        prompt_key=row.key,
        id=row.id,
        turn=answer.turn,
        ids=ids,
        prompt_len=len(answer.input_ids),
        thinking_end=_thinking_end(answer, spec.thinking_end_id),
        heldout=row.heldout,
        finish_reason="stop" if ended else answer.finish_reason,
        flags=[f for f in answer.flags if not (ended and f == TRUNCATED)],
    )


def _thinking_end(answer: Answer, marker: int) -> int:
    if marker not in answer.output_ids:
        return -1
    return len(answer.input_ids) + answer.output_ids.index(marker)


def _put_shard(store: Store, key: str, shard: bytes) -> None:
    """Write once; the shard of another who was first, perhaps by another zstd, is as good."""
    try:
        store.put_new(key, shard)
    except Conflict as error:
        ours, theirs = read_provenance(shard), read_provenance(store.get(key))
        if ours["content_sha256"] != theirs["content_sha256"]:
            raise Corrupt("a shard of other content stands in its place") from error
