"""The next microbatches, made ahead by a thread while the step in hand computes.

Between intake.py and train.py. The thread reads, arranges and builds, a few microbatches ahead and
no more; where a GPU eats them they lie in pinned memory, so that their copy goes on beside other
work. Invariant: what comes out is what the walk gives, in its order; an error of the thread comes
out where the microbatch would have, and `close` leaves no thread behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from trainer.online.batches import MicroBatch, Place
from trainer.online.walk import Mine, Walk

DEPTH = 4  # microbatches ahead: a few megabytes that outlast a window's reading
_LOOK_S = 0.2  # how long a full or an empty queue is waited at before looking for `close`


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


class Prefetch:
    """An iterator over a walk's microbatches; a context manager that closes the walk with it."""

    def __init__(
        self, walk: Walk, place: Place, *, mine: Mine, device: torch.device, depth: int = DEPTH
    ) -> None:
        self._walk = walk
        self._is_pinned = device.type == "cuda"
        self._ready: queue.Queue[MicroBatch | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        self._end: _End | None = None
        self.waited_s = 0.0  # by the caller, so far: the time that the data starved training
        microbatches = walk.microbatches(place, mine=mine)
        self._thread = threading.Thread(
            target=self._fill, args=(microbatches,), name="prefetch", daemon=True
        )
        self._thread.start()

    def take(self, timeout_s: float) -> MicroBatch | None:
        """The next one; None where it is not there in time, and at the end. Raises the thread's
        error, again each time.
        """
        if self._end is None:
            began = time.monotonic()
            try:
                found = self._ready.get(timeout=timeout_s)
            except queue.Empty:
                return None
            finally:
                self.waited_s += time.monotonic() - began
            if isinstance(found, MicroBatch):
                return found
            self._end = found
        if self._end.error is not None:
            raise self._end.error
        return None

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            found = self.take(_LOOK_S)
            if found is not None:
                yield found
            elif self._end is not None:
                return

    def close(self) -> None:
        """End the thread, wherever it is. Safe to call twice."""
        self._closed.set()
        self._walk.close()
        self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, microbatches: Iterator[MicroBatch]) -> None:
        end = _End(None)
        try:
            for microbatch in microbatches:
                if not self._put(microbatch.pin() if self._is_pinned else microbatch):
                    return
        except Exception as error:  # the thread's outermost frame: the caller raises it
            end = _End(error)
        self._put(end)

    def _put(self, item: MicroBatch | _End) -> bool:
        """False where nobody wants it any more."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=_LOOK_S)
                return True
            except queue.Full:
                continue
        return False
