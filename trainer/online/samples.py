"""All samples of a run at once, for runs and parts of runs that fit into memory.

Read by trainer/heldout.py, by the demo and by whoever measures; training on a run of any size goes
through intake.py.
"""

from __future__ import annotations

from dflash_workers.contract.store import Store
from trainer.tokens.reading import list_shards
from trainer.tokens.shards import Sample, read_shard


def read_samples(store: Store, run: str, *, heldout: bool) -> list[Sample]:
    """All samples of a run's shards that are (not) held out, in a fixed order."""
    samples = [s for key in list_shards(store, run) for s in read_shard(store.get(key))]
    return sorted(
        (s for s in samples if s.heldout == heldout), key=lambda s: (s.prompt_key, s.turn)
    )
