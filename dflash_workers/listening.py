"""One answer, heard while it is sampled: noted now and then, stopped when it goes round in circles.

Made by answering, called by engine with all ids so far. Notes are for hosts that vanish without a
word; they are written beside the event loop, and whoever writes takes along what others noted. A
loop is looked for only where a limit is high enough for stopping to save something.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from dflash_workers.journal import Journal
from dflash_workers.notes import Partial, extended
from dflash_workers.quality import LOOK_EVERY, LOOK_OVER, loop_in


@dataclass(frozen=True, slots=True)
class Noting:
    """Where an answer is noted while it is sampled."""

    journal: Journal
    prompt_key: str
    every: int  # ids; 0: not at all


class Listener:
    """Hears one answer. `every`: ids between two calls; 0: there is nothing to hear for."""

    def __init__(self, begun: Partial, noting: Noting, max_new_tokens: int, call_id: int) -> None:
        look_every = LOOK_EVERY if max_new_tokens > LOOK_OVER else 0
        self.every = min(filter(None, (noting.every, look_every)), default=0)
        self.loop = ""  # the flag for which it was stopped
        self._begun = begun
        self._noting = noting
        self._look_every = look_every
        self._call_id = call_id
        self._num_noted = self._num_looked_at = len(begun.output_ids)
        self._started = time.monotonic()

    def hear(self, ids: list[int]) -> bool:
        """Whether it is to go on. `ids`: all since `begun`."""
        whole = extended(self._begun, ids, time.monotonic() - self._started)
        num_ids = len(whole.output_ids)
        if self._look_every and num_ids - self._num_looked_at >= self._look_every:
            self._num_looked_at = num_ids
            self.loop = loop_in(whole.output_ids, self._call_id)
        if self._noting.every and num_ids - self._num_noted >= self._noting.every:
            self._num_noted = num_ids
            self._note(whole)
        return not self.loop

    def _note(self, whole: Partial) -> None:
        self._noting.journal.put(self._noting.prompt_key, whole)
        self._noting.journal.write_soon()
