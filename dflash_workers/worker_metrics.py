"""A worker's own numbers, read when Prometheus asks.

Served by the `worker` verb where it was told a port. From <- what the process shares (worksite) and
what the engine tells of itself (engine_load).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_workers.engine_load import EngineLoad
from dflash_workers.exposition import Numbers
from dflash_workers.worksite import DEAD, FOREIGN, RECEIVED, UNREADABLE, Site

STATES = ("up", "draining", "paused")


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """Of one process."""

    site: Site
    load: EngineLoad

    def read(self) -> Numbers:
        """As of now. Costs no request."""
        site, numbers = self.site, Numbers()
        state, slot = self._state(), site.slot
        for name in STATES:
            numbers.put("dflash_worker_state", name == state, slot, name)
        for what, value in (
            ("in_flight_requests", site.engine.num_running),
            ("limit_requests", self.load.max_in_flight),
            ("held_batches", len(site.holds)),
            ("busy_slots", site.tally.num_busy),
            ("output_tokens_total", site.engine.num_tokens),
            ("replies_total", site.engine.num_replies),
            ("engine_deaths_total", site.engine.num_deaths),
            ("kv_use_ratio", self.load.load.kv_use),
            ("accept_length", self.load.load.accept_length),
        ):
            numbers.put(f"dflash_worker_{what}", value, slot)
        for kind in (RECEIVED, FOREIGN, UNREADABLE, DEAD):
            numbers.put("dflash_worker_messages_total", site.tally[kind], slot, kind)
        return numbers

    def _state(self) -> str:
        if self.site.holds.draining.is_set():
            return "draining"
        return "paused" if self.site.gate.why_closed() else "up"
