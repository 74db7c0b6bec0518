"""Every error this system raises on purpose, and the fate that each class decides.

    FleetError
    |- Transient              wait with backoff, then do the same again
    |  |- StoreUnavailable    S3 can't be reached, is slow, or answers 5xx
    |  |- QueueUnavailable    Redis can't be reached or is loading
    |  `- EngineUnavailable   the inference server can't be reached or is overloaded
    |- Permanent              the same again would fail the same way: say it, reject it
    |  |- BadInput            a file, row, flag or setting that a person gave is wrong
    |  |  `- BadUsage         of these, a flag or setting: the command's exit status is 2
    |  |- AccessDenied        a password, key or permission is wrong
    |  |- Missing             a named thing (run, bucket, object, model) does not exist
    |  |- Conflict            a key that may be written once holds something else
    |  |- Corrupt             stored bytes do not match their checksum or their schema
    |  |- PromptRejected      one prompt can't be answered; carries a reason code
    |  |- EngineFailed        the inference server died or never got ready
    |  `- NotEnough           disk, memory or data is short for what was asked
    |- Draining               this process is leaving: give the work back, nothing failed
    |- Cancelled              the run was cancelled: drop the work, give nothing back
    `- LeaseLost              somebody else holds the batch: stop, give nothing back

Third-party errors become one of these at the edge where they arise (store.py, engine.py, ...), by
table; call sites never decide. Messages name the thing and say what to do next.
"""

from __future__ import annotations


class FleetError(Exception):
    """Root of the tree: never raised itself."""


class Transient(FleetError):
    """The same call may succeed later."""


class StoreUnavailable(Transient):
    """S3 did not answer, or answered that it can't right now."""


class QueueUnavailable(Transient):
    """Redis did not answer, or is still loading."""


class EngineUnavailable(Transient):
    """The inference server did not answer, or answered that it can't right now.

    `retry_after_s`: it asked to be left alone for so long; 0: it did not say.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Permanent(FleetError):
    """The same call would fail the same way."""


class BadInput(Permanent):
    """What a person gave (file, row, flag, setting) is wrong."""


class BadUsage(BadInput):
    """A flag or setting is wrong or missing, whatever the files, S3 and Redis hold."""


class AccessDenied(Permanent):
    """A password, key or permission is wrong."""


class Missing(Permanent):
    """A named thing does not exist."""


class Conflict(Permanent):
    """A key that may be written only once already holds something else."""


class Corrupt(Permanent):
    """Stored bytes do not match their checksum or their schema."""


class PromptRejected(Permanent):
    """One prompt can't be answered. `reason` is a stable code, the message is for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class EngineFailed(Permanent):
    """The inference server died, or never got ready."""


class NotEnough(Permanent):
    """Disk, memory or data is short for what was asked."""


class Draining(FleetError):
    """This process is leaving; its work goes back to the queue."""


class Cancelled(FleetError):
    """The run was cancelled; nobody is to work on it any more."""


class LeaseLost(FleetError):
    """Another holder has the batch; what this one noted stays noted."""
