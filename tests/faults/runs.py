"""A run inside a fleet, as a test drives it: plan, hint, wait for commits, prove what came out.

What a batch holds at the end is compared with answers.py, which knows what the engine had to say,
and with the plan: every prompt once, in order, with exactly its own answer.
"""

from __future__ import annotations

import dataclasses

from dflash_workers.contract.commit import committed_batches, read_commit, read_rows
from dflash_workers.contract.keys import RunKeys, batch_name
from dflash_workers.contract.lines import dump
from dflash_workers.contract.plan import read_segments
from dflash_workers.contract.records import BatchMessage, Commit, Prompt, Row, RunSpec
from dflash_workers.contract.settings import Settings
from dflash_workers.contract.store import Store
from producer.audit import audit
from producer.ledger import Ledger
from producer.reconcile import lost_hints, offer
from tests.faults.answers import Answers
from tests.faults.fleet import SHORT, Fleet
from tests.faults.processes import EngineServer, Process, until
from tests.faults.token_log import Request, read_requests, remade
from tests.planned import Plan, prompt

KEPT_SLOT = "kept"


class FaultRun:
    """One run, its plan and its workers."""

    def __init__(self, fleet: Fleet, spec: RunSpec) -> None:
        self.fleet = fleet
        self.spec = spec
        self.plan = Plan(fleet.store, fleet.hints, spec)
        self.store.put_new(RunKeys(spec.run).spec, dump(spec))

    @property
    def store(self) -> Store:
        return self.fleet.store

    @property
    def name(self) -> str:
        return self.spec.run

    @property
    def queue(self) -> str:
        return self.plan.queue

    def add(self, *batches: list[Prompt]) -> list[BatchMessage]:
        """Plan batches, and send their hints."""
        messages = self.plan.add(*batches)
        self.fleet.hints.offer(messages, self.queue)
        return messages

    def settings(self, engine: EngineServer, max_in_flight: int = 8) -> Settings:
        """Of a worker of this run."""
        settings = self.fleet.settings(self.name)
        return dataclasses.replace(settings, engine_url=engine.url, max_in_flight=max_in_flight)

    def worker(
        self,
        slot: str = "w1",
        *,
        engine: str = "engine",
        module: str = SHORT,
        max_in_flight: int = 8,
    ) -> Process:
        """A worker on this run and an engine, ready."""
        settings = self.settings(self.fleet.engine(engine), max_in_flight)
        return self.fleet.worker(slot, settings, module=module)

    def keep_worker(self) -> Process:
        """A worker of this run's target that lives: the last test's, or a new one."""
        worker = self.fleet.workers.get(KEPT_SLOT)
        if worker is None or not worker.is_alive:
            worker = self.worker(KEPT_SLOT)
        return worker

    def commit(self, message: BatchMessage) -> Commit:
        return read_commit(self.store, message.run, message.segment, message.batch)

    def rows(self, message: BatchMessage) -> list[Row]:
        """Checked against the commit's sha256."""
        return read_rows(self.store, self.commit(message))

    def committed(self) -> set[str]:
        """The batches that are done."""
        return {batch for _, batch in committed_batches(self.store, self.name)}

    def wait(self, *messages: BatchMessage, timeout_s: float = 60) -> None:
        """Until the batches are committed."""
        wanted = {message.batch for message in messages}
        until(lambda: wanted <= self.committed(), timeout_s, "the commits")

    def is_done(self, messages: list[BatchMessage]) -> bool:
        return {message.batch for message in messages} <= self.committed()

    def wait_with_supervisor(self, slot: str, *messages: BatchMessage, timeout_s: float) -> None:
        """Until the batches are committed; a worker that leaves, non-zero, is started again."""
        worker = self.fleet.workers[slot]

        def is_done() -> bool:
            if not worker.is_alive:
                assert worker.wait(1) != 0
                worker.start()
            return self.is_done([*messages])

        until(is_done, timeout_s, "the commits")

    def keys_of_batches(self) -> list[bytes]:
        """What Redis keeps of this run but its progress lease."""
        prefix = self.fleet.hints.keys.prefix
        keys = list(self.fleet.hints.redis.scan_iter(f"{prefix}*{self.name}*"))
        return [key for key in keys if b":progress:" not in key]

    def notes(self, message: BatchMessage) -> dict[str, bytes]:
        """The batch's journal, by "<prompt key>:<turn>"; partial notes are in it, too."""
        key = self.fleet.hints.keys.journal(self.name, batch_name(message.segment, message.batch))
        fields: dict[bytes, bytes] = self.fleet.hints.redis.hgetall(key)  # type: ignore[assignment]
        return {field.decode(): row for field, row in fields.items()}

    def num_noted(self, message: BatchMessage) -> int:
        """Turns that stand in the batch's journal."""
        return len(self.notes(message))

    def num_waiting_first_in_line(self) -> int:
        """Messages that were given back and go before all others."""
        return int(self.fleet.hints.redis.llen(self.queue))

    def num_made_twice(self) -> int:
        """Tokens of this run that some engine sampled twice."""
        return sum(again.num_tokens for again in remade(self.asked()))

    def reconcile(self) -> int:
        """Send what is lost again, as one call of `dflash-fleet reconcile` does."""
        ledger = Ledger(self.store, self.name)
        return offer(
            ledger, self.fleet.hints, self.queue, lost_hints(ledger, self.fleet.hints, self.queue)
        )

    def prove(self) -> None:
        """Every planned prompt has one fate, every sha256 is right, every answer is the engine's
        own."""
        found = audit(self.store, self.name)
        assert found.is_whole, found
        answers = Answers(self.fleet.place.model_dir)
        for segment in read_segments(self.store, self.name):
            for batch in segment.batches:
                for row in self.rows(BatchMessage(self.name, segment.number, batch.batch)):
                    for answer in row.answers:
                        question = answers.read(answer.input_ids)
                        assert question.num_given == 0
                        limit = self.spec.sampling.max_new_tokens
                        assert answer.output_ids == question.answer_ids[:limit], row.id

    def asked(self, containing: str = "") -> list[Request]:
        """What this run's prompts had the engines do, in the order of time."""
        logs = [engine.token_log for engine in self.fleet.engines.values()]
        mine = (request for request in read_requests(logs) if self.name in request.message)
        return [request for request in mine if containing in request.message]

    def text(self, words: str) -> str:
        """A message that only this run has."""
        return f"{words} of {self.name}"


def prompts(run: FaultRun, count: int, words: str) -> list[Prompt]:
    """A batch of short questions that only this run has; `words` say how they are answered."""
    return [prompt(run.text(f"{words} number {number}")) for number in range(count)]
