"""The model of the claims and the real scripts do the same to every state of a batch's keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from dflash_workers.claims import Claims, Timing
from dflash_workers.contract.hints import Hints
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.records import BatchMessage
from tests.dflash_workers import claims_model as model
from tests.dflash_workers.claims_model import HOLDER, Redis, Rules

RUN, QUEUE = "run", "generate.test-claims-model"
MESSAGE = BatchMessage(RUN, 3, "b" * 16)
NAME = batch_name(MESSAGE.segment, MESSAGE.batch)
LEASE_MS, HANDOVER_MS = 1_000_000_000, 2_000_000_000
FAR_MS = 10**13  # deadlines that are not over
NUMBERS = {HOLDER: 1, "reap 1": 2, "release A": 3}  # tell deadlines apart

RULES = Rules()


def states() -> Iterator[Redis]:
    """All that the keys can be, those that never come about among them."""
    deadlines = [("", False), *itertools.product(NUMBERS, (False, True))]
    for pending, (deadline, overdue), lease, journal in itertools.product(
        (False, True), deadlines, ("", "A", "B"), (0, 1)
    ):
        yield Redis(pending, deadline, overdue, lease, journal)


class Keys:
    """The real keys, written and read as the model has them."""

    def __init__(self, hints: Hints) -> None:
        self.client, keys = hints.redis, hints.keys
        self.pending, self.inflight = keys.pending(RUN), keys.inflight(RUN)
        self.lease = keys.lease(RUN, NAME)
        self.notes = [keys.journal(RUN, NAME), keys.suspects(RUN, NAME)]  # come and go together

    def write(self, state: Redis) -> None:
        self.client.delete(self.pending, self.inflight, self.lease, *self.notes)
        if state.pending:
            self.client.zadd(self.pending, {NAME: 1})
        if state.deadline:
            self.client.zadd(self.inflight, {NAME: score_of(state)})
        if state.lease:
            self.client.set(self.lease, state.lease)
        for key in self.notes:
            if state.journal:
                self.client.hset(key, "field", "note")

    def read(self, handed_over_by: str) -> Redis:
        score = self.client.zscore(self.inflight, NAME)
        deadline, overdue = "", False
        if score is not None:
            deadline, overdue = self._deadline_of(score, handed_over_by)
        lease = self.client.get(self.lease) or b""
        num_notes = self.client.exists(*self.notes)
        assert isinstance(lease, bytes)
        assert num_notes in (0, len(self.notes))
        is_pending = self.client.zscore(self.pending, NAME) is not None
        return Redis(is_pending, deadline, overdue, lease.decode(), int(num_notes > 0))

    def _deadline_of(self, score: float, handed_over_by: str) -> tuple[str, bool]:
        for deadline, number in NUMBERS.items():
            if score in (number, FAR_MS + number):
                return deadline, score == number
        seconds, _ = self.client.time()
        is_lease = abs(score - seconds * 1000 - LEASE_MS) < HANDOVER_MS / 4
        return (HOLDER if is_lease else handed_over_by), False


def score_of(state: Redis) -> int:
    number = NUMBERS[state.deadline]
    return number if state.overdue else FAR_MS + number


def in_model(verb: str, state: Redis) -> tuple[Redis, object]:
    """What worker A's call, or sweep 1's, comes to: the keys, and the answer."""
    match verb:
        case "claim":
            return model.claim(state, "A")
        case "renew":
            return model.renew(state, "A", RULES)
        case "release":
            return model.release(state, "A", RULES)
        case "reap":
            return (model.reap(state, "1", RULES) if state.overdue else state), state.overdue
        case "settle":
            after = model.settle(state, "reap 1", RULES)
            return after, state.deadline == "reap 1"
        case "clear":
            return model.clear(state, "A", RULES), True
        case _:
            return model.mark_pending(state, RULES)


def in_redis(verb: str, state: Redis, hints: Hints) -> object:
    claims = Claims(hints.redis, hints, Timing(LEASE_MS, HANDOVER_MS))
    match verb:
        case "claim" | "renew":
            return str(claims._call(RUN, verb, NAME, "A", LEASE_MS), "ascii")
        case "release":
            return bool(claims._call(RUN, verb, NAME, "A", HANDOVER_MS))
        case "reap":
            return claims._call(RUN, verb, "", 50, HANDOVER_MS)[1:] == [NAME.encode()]
        case "settle":
            deadline_ms = score_of(state._replace(deadline="reap 1"))
            return bool(claims._call(RUN, verb, NAME, deadline_ms))
        case "clear":
            return bool(claims._call(RUN, verb, NAME, "A"))
        case _:
            return bool(hints.offer([MESSAGE], QUEUE))


@pytest.mark.parametrize(
    ("verb", "handed_over_by"),
    [
        ("claim", ""),
        ("renew", ""),
        ("release", "release A"),
        ("reap", "reap 1"),
        ("settle", ""),
        ("clear", ""),
        ("offer", ""),
    ],
)
def test_a_script_does_to_any_state_what_the_model_says(
    verb: str, handed_over_by: str, hints: Hints
) -> None:
    keys = Keys(hints)
    for state in states():
        keys.write(state)

        answer = in_redis(verb, state, hints)

        assert (keys.read(handed_over_by), answer) == in_model(verb, state), state
