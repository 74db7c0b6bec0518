"""Hints: the messages that say "this batch may want work", and the set that remembers them.

Sent by the producer (enqueue, reconcile) and by workers that give a batch back. A hint may be lost
or doubled; whoever sends one first puts the batch in `pending:<run>`, unless somebody holds it, so
that a lost hint is noticed. See celeryconfig.py for names and priorities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, islice

import celery
import kombu.exceptions
import orjson

import celeryconfig
from dflash_workers.contract.errors import QueueUnavailable
from dflash_workers.contract.keys import batch_name
from dflash_workers.contract.queues import Queues, first_line, open_queues, translated_redis
from dflash_workers.contract.records import BatchMessage, encode
from dflash_workers.contract.settings import Settings

_SENT_AT_ONCE = 100

# KEYS: pending, inflight, then each batch's lease.  ARGV: the batches' names.  Time is Redis' own.
# Returns 1 for each batch that nobody holds: that is pending now.
_MARK_PENDING = """
local now = redis.call('TIME')
local since = now[1] * 1000 + math.floor(now[2] / 1000)
local marked = {}
for i, name in ipairs(ARGV) do
  local held = redis.call('EXISTS', KEYS[i + 2]) == 1 or redis.call('ZSCORE', KEYS[2], name)
  if not held then redis.call('ZADD', KEYS[1], 'NX', since, name) end
  marked[i] = held and 0 or 1
end
return marked
"""


@dataclass(frozen=True, slots=True)
class Hints(Queues):
    """Sends hints. Safe to share between threads."""

    app: celery.Celery

    def offer(
        self,
        messages: Iterable[BatchMessage],
        queue: str,
        priority: int = celeryconfig.PRIORITY_ORDINARY,
    ) -> int:
        """Mark each batch pending and send its hint; return how many were sent.

        Takes the messages of one run, a hundred at a time, as they come. What was marked and could
        not be sent any more, `reconcile` finds.
        """
        num_sent = 0
        waiting = iter(messages)
        with _translated(self.where), self._sender() as kombu_producer:
            mark = self.redis.register_script(_MARK_PENDING)
            publish = _prepared(self.app, kombu_producer, queue, priority)
            while chunk := list(islice(waiting, _SENT_AT_ONCE)):
                marked = mark(*self._names(chunk))
                with kombu_producer.batch(_SENT_AT_ONCE):  # type: ignore[attr-defined]
                    for message in compress(chunk, marked):
                        publish(message)
                num_sent += sum(marked)
        return num_sent

    def give_back(self, message: BatchMessage, queue: str) -> None:
        """Send a hint that goes first in line; the caller moves the batch in the claims."""
        with _translated(self.where), self.app.producer_or_acquire() as kombu_producer:
            self._send(message, queue, celeryconfig.PRIORITY_GIVEN_BACK, kombu_producer)

    def tell_tokenizers(self, messages: Iterable[BatchMessage]) -> int:
        """Say of each batch that it is committed; return how many were told.

        Nothing remembers these hints: what one is lost of, the tokenizers' own sweep finds.
        """
        queue, priority = celeryconfig.TOKENIZE_QUEUE, celeryconfig.PRIORITY_ORDINARY
        num_told = 0
        with _translated(self.where), self.app.producer_or_acquire() as kombu_producer:
            task = celeryconfig.TOKENIZE_TASK
            publish = _prepared(self.app, kombu_producer, queue, priority, task)
            for message in messages:
                publish(message)
                num_told += 1
        return num_told

    def announce(self, message: BatchMessage) -> None:
        """Tell the tokenizers of a commit, if any are up: else hints would pile up unread."""
        with translated_redis(self.where):
            is_read = bool(self.redis.exists(self.keys.tokenizers))
        if is_read:
            self.tell_tokenizers([message])

    def _names(self, messages: list[BatchMessage]) -> tuple[list[str], list[str]]:
        """KEYS and ARGV of the script that marks them pending."""
        run = messages[0].run
        names = [batch_name(message.segment, message.batch) for message in messages]
        leases = [self.keys.lease(run, name) for name in names]
        return [self.keys.pending(run), self.keys.inflight(run), *leases], names

    @contextmanager
    def _sender(self) -> Iterator[kombu.Producer]:
        """A sender of its own connection, because kombu sends a batch in one go only where nothing
        may repeat it: the app's connection would, after a timeout."""
        options = {**celeryconfig.broker_transport_options, "retry_on_timeout": False}
        with kombu.Connection(self.app.conf.broker_url, transport_options=options) as connection:
            yield connection.Producer()

    def _send(
        self, message: BatchMessage, queue: str, priority: int, kombu_producer: kombu.Producer
    ) -> None:
        self.app.send_task(
            celeryconfig.GENERATE_TASK,
            kwargs=encode(message),
            task_id=task_id(message),
            queue=queue,
            priority=priority,
            producer=kombu_producer,
            retry=False,
        )


def task_id(message: BatchMessage) -> str:
    """A hint's id in Celery, which says what it is of: "<run>/<segment>/<batch>"."""
    return f"{message.run}/{batch_name(message.segment, message.batch)}"


def _prepared(
    app: celery.Celery,
    kombu_producer: kombu.Producer,
    queue: str,
    priority: int,
    task: str = celeryconfig.GENERATE_TASK,
) -> Callable[[BatchMessage], None]:
    """Sends hints as `send_task` would, which makes each anew and takes ten times as long."""
    model = app.amqp.create_task_message("", task, argsrepr="()", ignore_result=True)
    _, _, embedded = model.body

    def publish(message: BatchMessage) -> None:
        name = task_id(message)
        kombu_producer.publish(
            orjson.dumps(((), message, embedded)).decode(),
            content_type="application/json",
            content_encoding="utf-8",
            routing_key=queue,
            exchange="",
            priority=priority,
            delivery_mode=2,
            headers={**model.headers, "id": name, "root_id": name, "kwargsrepr": name},
            correlation_id=name,
        )

    return publish


def open_hints(settings: Settings) -> Hints:
    """A sender from settings."""
    app = celery.Celery("dflash", broker=settings.broker_url, set_as_current=False)
    app.config_from_object("celeryconfig")
    app.conf.update(broker_url=settings.broker_url)
    looked_at = open_queues(settings)
    return Hints(looked_at.redis, looked_at.keys, looked_at.where, app)


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """Redis' and kombu's errors as ours."""
    try:
        with translated_redis(where):
            yield
    except kombu.exceptions.KombuError as error:
        raise QueueUnavailable(f"Redis at {where} can't be reached: {first_line(error)}") from error
