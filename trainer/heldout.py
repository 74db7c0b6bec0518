"""A run's held-out samples, and where their prompts came from.

Read by the verbs `evaluate`, `parity` and `export`. Samples lie in the shards; the source of a
prompt lies in the plan, where it was planned, and only the batches of the prompts asked about are
read. Invariant: the target at hand is the one that answered.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dflash_workers.contract.plan import read_prompts, read_segments, read_spec
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store, open_store
from trainer.online.fingerprint import check_target
from trainer.online.samples import read_samples
from trainer.tokens.shards import Sample

UNKNOWN = "unknown"  # a source that no plan names


@dataclass(frozen=True, slots=True, eq=False)
class HeldOut:
    """Of a run, as many as were asked for, in a fixed order that says nothing of the prompts."""

    store: Store
    spec: RunSpec
    samples: list[Sample]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Of the run."""
        return frozenset(self.spec.sampling.stop_token_ids)

    def sources(self, keys: Collection[str]) -> dict[str, str]:
        """The file or place of each of those prompts, without the line."""
        wanted, found = set(keys), {}
        for segment in read_segments(self.store, self.spec.run):
            for batch in segment.batches:
                if wanted.intersection(batch.prompt_keys):
                    for prompt in read_prompts(self.store, segment, batch):
                        found[prompt.key] = place_of(prompt.source)
        return {key: found.get(key, UNKNOWN) for key in keys}


def read_heldout(settings: Settings, most: int) -> HeldOut:
    """At most so many samples. Raises Missing, and Conflict where the model at hand is not the
    run's target.
    """
    store, run = open_store(settings), settings.require_run()
    spec = read_spec(store, run)
    check_target(spec, settings.model)
    return HeldOut(store, spec, read_samples(store, run, heldout=True, most=most))


def place_of(source: str) -> str:
    """The file of a source such as "path:7" or "path#7"; others stay whole."""
    path = source.rstrip("0123456789")
    return path[:-1] if path != source and path[-1:] in (":", "#") else source
