"""That a run has one promoter: a lock in Redis, kept by a thread, lost when its holder is gone.

Held by -> promoter around all that it does; nodes take a trial for over when nobody holds it.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

import redis
from redis.exceptions import LockError

from dflash_workers.contract.errors import Conflict, FleetError
from dflash_workers.contract.keys import PROMOTER_S, RedisKeys
from dflash_workers.contract.queues import translated_redis

log = logging.getLogger(__name__)


class PromoterLease:
    """Of one run. A flush of Redis doesn't end it, unless somebody else is faster then."""

    def __init__(self, client: redis.Redis, keys: RedisKeys, run: str, where: str) -> None:
        name = keys.promoter(run)
        self._lock = client.lock(name, timeout=PROMOTER_S, blocking=False, thread_local=False)
        self._run = run
        self._where = where
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)

    def check(self) -> None:
        """Raises Conflict once it is somebody else's."""
        if self._lost.is_set():
            raise Conflict(f"another promotion of run {self._run!r} has begun meanwhile")

    def __enter__(self) -> PromoterLease:
        """Raises Conflict where somebody has it."""
        with translated_redis(self._where):
            if not self._lock.acquire():
                raise Conflict(
                    f"a promotion of run {self._run!r} is on; a dead one's lease ends after "
                    f"{PROMOTER_S} s"
                )
        self._renewing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._renewing.join()
        try:
            with translated_redis(self._where):
                self._lock.release()
        except (FleetError, LockError) as trouble:
            log.warning("the promotion's lease is left to lapse: %s", trouble)

    def _renew(self) -> None:
        while not self._ended.wait(PROMOTER_S / 6):
            try:
                with translated_redis(self._where):
                    self._keep()
            except FleetError as trouble:
                log.warning("%s", trouble)

    def _keep(self) -> None:
        try:
            self._lock.reacquire()
        except LockError:
            if not self._lock.acquire():
                self._lost.set()
