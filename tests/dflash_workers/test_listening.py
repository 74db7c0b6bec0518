"""What is heard of an answer while it comes, and when that is worth it."""

from __future__ import annotations

import asyncio

import pytest

from dflash_workers.claims import Claim
from dflash_workers.contract.flags import STUCK_IDS
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import BatchMessage
from dflash_workers.journal import Journal, Journals
from dflash_workers.listening import Listener, Noting
from dflash_workers.notes import Partial, digest_of
from dflash_workers.quality import LOOK_EVERY, LOOK_OVER

ASKED = [1, 2, 3]
LOOP = [7, 8] * 4000


def begun(output_ids: list[int]) -> Partial:
    return Partial(digest_of(ASKED), 0, 7, output_ids, [len(output_ids)] if output_ids else [])


@pytest.fixture
def journal(hints: Hints) -> Journal:
    journals = Journals(hints.redis, hints.keys, hints.where)
    return journals.open(Claim(BatchMessage("run", 0, "b"), "a"))


@pytest.mark.parametrize(
    ("note_every", "max_new_tokens", "every"),
    [
        (0, LOOK_OVER, 0),
        (0, LOOK_OVER + 1, LOOK_EVERY),
        (100, LOOK_OVER, 100),
        (100, LOOK_OVER + 1, 100),
        (10_000, LOOK_OVER + 1, LOOK_EVERY),
    ],
)
def test_it_listens_as_often_as_somebody_needs_it(
    journal: Journal, note_every: int, max_new_tokens: int, every: int
) -> None:
    listener = Listener(begun([]), Noting(journal, "k", note_every), max_new_tokens, -1)

    assert listener.every == every


def test_a_loop_ends_it_soon_after_it_is_long_enough(journal: Journal) -> None:
    listener = Listener(begun([]), Noting(journal, "k", 0), 32_000, -1)
    words = list(range(1000))

    heard = next(n for n in range(0, 8000, 16) if not listener.hear(words + LOOP[:n]))

    assert STUCK_IDS <= heard <= STUCK_IDS + LOOK_EVERY + 16
    assert listener.loop == "repetition"


def test_what_was_there_before_counts_as_heard(journal: Journal) -> None:
    listener = Listener(begun(LOOP[:400]), Noting(journal, "k", 0), 32_000, -1)

    assert listener.hear(LOOP[:LOOK_EVERY]) is False


def test_notes_hold_the_whole_and_never_shrink_when_the_engine_begins_anew(
    journal: Journal,
) -> None:
    async def hear() -> None:
        listener = Listener(begun([1] * 10), Noting(journal, "k", 100), 400, -1)
        for num_ids in (99, 100, 150, 30, 120, 210):  # asked again after 150
            listener.hear(list(range(num_ids)))
            await asyncio.sleep(0.05)
            found = await journal.find("k", 0, ASKED)
            seen.append(len(found.output_ids) if found else 0)

    seen: list[int] = []
    asyncio.run(hear())

    assert seen == [0, 110, 110, 110, 110, 220]
