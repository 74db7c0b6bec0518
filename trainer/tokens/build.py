"""A commit -> its token shard, written once.

Reads commits and the data that they name <- dflash_workers or `import`, writes tokens/<version>/
through shards.py -> online/intake.py. Called for one batch by stage.py and for a run by
whole_run.py. A shard is a pure function of its commit, so that whoever is second finds his own
content; "done" means that the shard exists, also where no answer of the batch trains. What is
corrupt or gone is quarantined: noted in S3, so that nobody tries it for ever, and no other batch
suffers from it.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import orjson

from dflash_workers.contract.commit import read_commit, read_rows
from dflash_workers.contract.errors import Conflict, Corrupt, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import Commit, RunSpec
from dflash_workers.contract.store import Store
from trainer.tokens.answered import read_answered
from trainer.tokens.ids_road import samples_of
from trainer.tokens.shards import Provenance, Source, read_provenance, write_shard
from trainer.tokens.text_road import TextRoad, open_text_road

IDS, TEXT = ROADS = ("ids", "text")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch: its shard's provenance, or why there is none."""

    key: str
    provenance: Provenance | None = None
    is_new: bool = False
    quarantined: str = ""  # what is wrong with it
    num_waiting: int = 0  # conversations that want the target's tokenizer


@dataclass(frozen=True)
class Builder:
    """Makes one run's shards. Safe to use again, and in several processes at once."""

    store: Store
    spec: RunSpec
    model_dir: str = ""  # of the target, for imported conversations; empty: those wait

    def make(self, segment: int, batch: str) -> Outcome:
        """The batch's shard, made now or found.

        Raises Transient, and BadInput or Missing for a model folder that is not the run's target.
        """
        keys = RunKeys(self.spec.run)
        key = keys.shard(segment, batch)
        try:
            if found := self._find(key):
                return Outcome(key, found)
            commit = read_commit(self.store, self.spec.run, segment, batch)
            if commit.road == TEXT and not self.model_dir:
                return Outcome(key, num_waiting=commit.num_rows)
            shard = self.shard_of(commit)
            _put_shard(self.store, key, shard)
            return Outcome(key, read_provenance(shard), is_new=True)
        except (Corrupt, Missing) as error:
            self._quarantine(keys.quarantine(segment, batch), str(error))
            return Outcome(key, quarantined=str(error))

    def _find(self, key: str) -> Provenance | None:
        try:
            return read_provenance(self.store.get(key))
        except Missing:
            return None

    def shard_of(self, commit: Commit) -> bytes:
        """The shard of a commit. Raises Corrupt, Missing."""
        if commit.road == IDS:
            samples, skipped = samples_of(read_answered(self.store, commit), self.spec)
            return write_shard(samples, self._source(commit, skipped))
        if commit.road == TEXT:
            made = self._text_road.samples_of(read_rows(self.store, commit))
            return write_shard(made.samples, self._source(commit, made.skipped), made.quarantined)
        raise Corrupt(f"{commit.data_key}: no way to tokenize road {commit.road!r}")

    @cached_property
    def _text_road(self) -> TextRoad:
        return open_text_road(self.spec, self.model_dir)

    def _source(self, commit: Commit, skipped: dict[str, int]) -> Source:
        spec = self.spec
        return Source(
            road=commit.road,
            run=spec.run,
            commit_key=RunKeys(spec.run).commit(commit.segment, commit.batch),
            data_sha256=commit.sha256,
            target_fingerprint=spec.target.fingerprint(),
            tokenizer_sha256=spec.target.tokenizer_sha256,
            template_sha256=spec.target.template_sha256,
            vocab_size=spec.target.vocab_size,
            stop_token_ids=spec.sampling.stop_token_ids,
            tool_version=importlib.metadata.version("dflash-fleet"),
            skipped=dict(skipped),
        )

    def _quarantine(self, key: str, reason: str) -> None:
        with suppress(Conflict):  # noted before, perhaps in other words
            self.store.put_new(key, orjson.dumps({"error": reason}))


def _put_shard(store: Store, key: str, shard: bytes) -> None:
    """Write once; the shard of another who was first, perhaps by another zstd, is as good."""
    try:
        store.put_new(key, shard)
    except Conflict as error:
        ours, theirs = read_provenance(shard), read_provenance(store.get(key))
        if ours["content_sha256"] != theirs["content_sha256"]:
            raise Corrupt("a shard of other content stands in its place") from error
