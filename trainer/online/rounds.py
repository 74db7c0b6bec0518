"""One rank's steps, from where a run stands to its end: the loop of the training.

Made by train.py of what building.py built. A drafter's rank eats a step's microbatches and updates;
a target's rank looks at them and sends what it saw; the leader also measures, records and saves.
Invariants: step s has the microbatches from s * num_microbatches on, whoever makes and eats them;
all ranks leave before the same step; what is not finite ends the run before it reaches a weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import orjson

from dflash_workers.contract.errors import Permanent
from dflash_workers.contract.records import Json
from trainer.online.batches import MicroBatch
from trainer.online.building import Built
from trainer.online.checkpoint import TrainState, take_snapshot
from trainer.online.colocated import Colocated, Pantry
from trainer.online.keeping import Keeper
from trainer.online.measuring import (
    Heldout,
    heldout_batches,
    measured_accept_length,
    pack_samples,
    unpack_samples,
)
from trainer.online.paired import Receiver, Sender
from trainer.online.prefetch import Prefetch
from trainer.online.ranks import Ranks
from trainer.online.recipe import TrainJob
from trainer.online.recording import Recorder
from trainer.online.step import Fed, StepMetrics, Stepper
from trainer.online.stopping import Stop
from trainer.online.stopwatch import TRANSFER, Stopwatch
from trainer.online.together import Together
from trainer.online.work import microbatch_flops


@dataclass(frozen=True, slots=True, eq=False)
class Desk:
    """What only the leader has."""

    recorder: Recorder
    keeper: Keeper
    heldout: Heldout
    provenance: Callable[[], Json]  # of this moment
    starved_s: Callable[[], float]


class Rounds:
    """See the header. `state` is always that after the last whole step."""

    def __init__(
        self,
        job: TrainJob,
        ranks: Ranks,
        built: Built,
        state: TrainState,
        *,
        batches: Prefetch,
        stop: Stop,
    ) -> None:
        self.state = state
        self._job = job
        self._recipe = job.recipe
        self._ranks = ranks
        self._built = built
        self._stop = stop
        self._watch = built.watch
        self._pantry = Pantry(batches, state.place, ranks.device, self._watch, stop.is_asked)
        self._feeder = _feeder(ranks, built, state, self._pantry, self._watch)
        self._sender: Sender | None = None
        if not ranks.has_drafter and built.eyes:
            self._sender = Sender(ranks, self._pantry, built.eyes, self._watch)
        self._eaten: dict[int, list[str]] = {}  # samples of the step in hand, by microbatch
        self._began = time.monotonic()
        self._saved = state.step

    def run(self, desk: Desk | None, num_microbatches: int | None) -> bool:
        """To the end; of all data where there are `num_microbatches`. True: not to the end, because
        some rank was asked to leave. Raises Draining where this one was while it starved.
        """
        wait_s = 0.0
        for step in range(self.state.step, self.state.num_steps):
            asked, wait_s = self._ranks.ask([float(self._stop.is_asked()), wait_s])
            if asked:
                break
            first = step * self._recipe.num_microbatches
            end = min(first + self._recipe.num_microbatches, num_microbatches or 1 << 62)
            mine = [g for g in range(first, end) if self._ranks.is_mine(g)]
            if self._built.stepper:
                self._drafter_step(self._built.stepper, mine, desk, wait_s)
                wait_s = 0.0
            else:
                wait_s = self._target_step(mine)
        if self._sender:
            self._sender.settle()
        return not self.state.is_finished

    @property
    def needs_all_to_save(self) -> bool:
        """Whether a checkpoint takes all drafters' ranks."""
        return self._recipe.topology.shard_drafter

    def save(self, desk: Desk | None) -> None:
        """The state after the last step, unless it is saved already. Of a sharded drafter all
        ranks bring their part.
        """
        stepper = self._built.stepper
        if stepper is None or self._saved == self.state.step:
            return
        self._saved = self.state.step
        if desk is None:
            if self.needs_all_to_save:
                take_snapshot(self.state, stepper.drafter, stepper.optimizer)
            return
        now = time.monotonic()
        self.state = replace(
            self.state,
            seconds=self.state.seconds + now - self._began,
            provenance={**self.state.provenance, **desk.provenance()},
        )
        self._began = now
        desk.keeper.save(take_snapshot(self.state, stepper.drafter, stepper.optimizer))

    def _drafter_step(
        self, stepper: Stepper, mine: list[int], desk: Desk | None, sender_wait_s: float
    ) -> None:
        step = self.state.step
        self._eaten.clear()
        fed = self._remembered(self._feeder.feed(mine)) if self._feeder else iter(())
        metrics = stepper.step(fed, at=step, num_steps=self.state.num_steps)
        if not metrics.is_finite:
            raise Permanent(self._not_finite(metrics))
        self.state = replace(
            self.state,
            step=step + 1,
            place=self._pantry.place,
            first_loss=self.state.first_loss if step else metrics.loss,
            last_loss=metrics.loss,
            accept_length=None,
        )
        try:
            if self._recipe.is_evaluated(self.state.step):
                length = self._measure(stepper, desk)
                self.state = replace(self.state, accept_length=length)
        finally:  # a rank that is lost meanwhile leaves a step that was taken
            seconds = self._watch.read()
            if desk:
                desk.recorder.note(
                    self.state,
                    metrics,
                    seconds,
                    starved_s=desk.starved_s(),
                    sender_wait_s=sender_wait_s,
                )
        if self._recipe.is_saved(self.state.step) or self.state.is_finished:
            self.save(desk)

    def _target_step(self, mine: list[int]) -> float:
        """Seconds that this target waited for drafters."""
        assert self._sender is not None
        self._sender.serve(mine)
        self.state = replace(self.state, step=self.state.step + 1)
        if self._recipe.is_evaluated(self.state.step):
            samples = unpack_samples(self._ranks.tell(b""))
            if self._ranks.is_mine(0):
                for batch, _prompt_len in heldout_batches(samples, self._recipe.data):
                    self._sender.send(batch, self._ranks.topology.leader)
        return self._watch.read()[TRANSFER]

    def _measure(self, stepper: Stepper, desk: Desk | None) -> float | None:
        """On the leader, and on those whose target is the leader's; the others only hear what is
        measured.
        """
        samples = desk.heldout.choose() if desk else []
        topology = self._ranks.topology
        if topology.is_paired or topology.ranks_per_target > 1:
            told = self._ranks.tell(pack_samples(samples))
            if self._built.eyes and self._ranks.is_mine(0):  # looks with the leader
                samples = unpack_samples(told)
        if self._feeder is None:
            return None
        feed_with = self._feeder.feed_with
        answers = (
            (feed_with(batch), prompt_len)
            for batch, prompt_len in heldout_batches(samples, self._recipe.data)
        )
        with stepper.ready_to_draft() as drafter:
            return measured_accept_length(drafter, self._built.ends, answers)

    def _remembered(self, feed: Iterator[Fed]) -> Iterator[Fed]:
        for fed in feed:
            keys = [placed.key for row in fed.batch.samples for placed in row]
            self._eaten[fed.batch.number] = keys
            yield fed

    def _not_finite(self, metrics: StepMetrics) -> str:
        step = self.state.step + 1
        path = self._job.out / f"not-finite-step-{step:08d}-rank-{self._ranks.rank}.json"
        facts = {
            "step": step,
            "loss": str(metrics.loss),
            "gradient_norm": str(metrics.gradient_norm),
            "samples": {str(number): keys for number, keys in self._eaten.items()},
        }
        path.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        return (
            f"step {step}: loss {metrics.loss}, norm of the gradient {metrics.gradient_norm}: no "
            f"weight was changed; this rank's samples of the step are named in {path}"
        )


def _feeder(
    ranks: Ranks, built: Built, state: TrainState, pantry: Pantry, watch: Stopwatch
) -> Colocated | Receiver | None:
    if not ranks.has_drafter:
        return None
    config, size = state.config, built.target_size

    def work(batch: MicroBatch) -> float:
        return microbatch_flops(config, size, batch)

    if built.eyes and ranks.topology.ranks_per_target > 1:
        return Together(ranks, pantry, built.eyes, work, watch)
    if built.eyes:
        return Colocated(pantry, built.eyes, work, watch)
    hidden = config.hidden_size
    return Receiver(
        ranks,
        pantry,
        widths=(len(config.target_layer_ids) * hidden, hidden if built.needs_teacher else 0),
        dtype=built.dtype,
        work=work,
        watch=watch,
    )
