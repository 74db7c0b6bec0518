"""Whoever looks at Redis or sends there hears of its errors in our words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.hints import Hints, open_hints
from dflash_workers.contract.queues import Queues, check_redis, open_queues
from dflash_workers.contract.records import BatchMessage
from dflash_workers.contract.settings import Settings

NOBODY = Settings(redis_url="redis://:secret@127.0.0.1:1/0")
MESSAGE = BatchMessage("run", 0, "batch")


@pytest.mark.parametrize(
    "look",
    [
        lambda queues: queues.num_queued("q"),
        lambda queues: queues.queued_names("q"),
        lambda queues: check_redis(queues.redis, NOBODY),
    ],
)
def test_a_look_at_nobody_is_unavailable_and_shows_no_password(
    look: Callable[[Queues], object],
) -> None:
    queues = open_queues(NOBODY)

    with pytest.raises(QueueUnavailable) as raised:
        look(queues)

    queues.redis.close()
    assert "127.0.0.1:1" in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "send",
    [
        lambda hints: hints.offer([MESSAGE], "q"),
        lambda hints: hints.give_back(MESSAGE, "q"),
        lambda hints: hints.tell_tokenizers([MESSAGE]),
    ],
)
def test_kombu_s_errors_are_redis_own_to_who_sends(send: Callable[[Hints], object]) -> None:
    hints = open_hints(NOBODY)
    hints.app.conf.broker_transport_options = {}
    hints.app.conf.broker_connection_timeout = 0.1  # for how long kombu tries again

    with pytest.raises(QueueUnavailable, match="can't be reached") as raised:
        send(hints)

    hints.app.close()
    hints.redis.close()
    assert "secret" not in str(raised.value)


def test_who_sends_also_looks(hints: Hints) -> None:
    queue = f"{hints.keys.prefix}queue"

    assert hints.offer([MESSAGE], queue) == 1

    looking = Queues(hints.redis, hints.keys, hints.where)
    assert (looking.num_queued(queue), looking.queued_names(queue)) == (1, {"run/0/batch"})
