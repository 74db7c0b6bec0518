"""Candidates in an order that neither their files nor their ids decide.

Stands between <- candidates.py and -> plan.py where prompts of several files are to be mixed. The
order is that of a hash of seed and key: the same prompts get the same order, and of what is left
after a kill, too. Memory stays flat: candidates lie on disk, in buckets by the first bits of that
hash, and one bucket at a time is sorted. What is no candidate passes through at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from producer.candidates import Candidate, Outcome
from producer.spool import opened_spool


def shuffled(outcomes: Iterable[Outcome], seed: int) -> Iterator[Outcome]:
    """All outcomes; candidates last and shuffled, those with equal keys in their own order."""
    seed_bytes = str(seed).encode()
    with opened_spool() as spool:
        for outcome in outcomes:
            if isinstance(outcome, Candidate):
                spool.add(_without_promise(outcome), _place(outcome.key, seed_bytes)[0])
            else:
                yield outcome
        for bucket in range(256):
            yield from sorted(spool.read(bucket), key=lambda o: _place_of(o, seed_bytes))


def _place_of(outcome: Outcome, seed_bytes: bytes) -> bytes:
    return _place(outcome.key, seed_bytes) if isinstance(outcome, Candidate) else b""


def _place(key: str, seed_bytes: bytes) -> bytes:
    return hashlib.blake2b(key.encode(), key=seed_bytes, digest_size=8).digest()


def _without_promise(candidate: Candidate) -> Candidate:
    """Planned does not mean any more that the row's earlier samples are planned, too."""
    return candidate._replace(line_digest="") if candidate.sample else candidate
