"""The runs that this worker serves: all that share its target.

From <- run.json in S3; to -> tasks and generate. A run of another target is refused, so that two
models' outputs never mix, whatever lands in the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_workers.contract.chat import Chat, load_tokenizer, tokenizer_sha256
from dflash_workers.contract.errors import BadInput, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import SCHEMA_VERSION, RunSpec
from dflash_workers.contract.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Run:
    """A run as this worker answers it."""

    spec: RunSpec
    chat: Chat


class Runs:
    """Reads each run once. Safe to share between threads."""

    def __init__(self, store: Store, first: RunSpec, tokenizer: PreTrainedTokenizerBase) -> None:
        self._store = store
        self._target = first.target
        self._tokenizer = tokenizer
        self._open: dict[str, Run] = {}
        self._add(first)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._open))

    def open(self, run: str) -> Run:
        """Raises Missing or BadInput for a run that this worker can't serve."""
        if run not in self._open:
            spec = read_spec(self._store, run)
            if spec.target.fingerprint() != self._target.fingerprint():
                raise BadInput(f"run {run!r} is of another target than this worker's")
            self._add(spec)
        return self._open[run]

    def _add(self, spec: RunSpec) -> None:
        chat = Chat(self._tokenizer, spec.chat_template, spec.template_kwargs)
        self._open[spec.run] = Run(spec, chat)


def read_spec(store: Store, run: str) -> RunSpec:
    """run.json. Raises Missing, Corrupt, BadInput."""
    try:
        spec = load(RunSpec, store.get(RunKeys(run).spec))
    except Missing as error:
        raise Missing(
            f"run {run!r} is not planned: `dflash-fleet enqueue` first: {error}"
        ) from error
    if spec.schema != SCHEMA_VERSION:
        raise BadInput(f"run {run!r} has schema {spec.schema}, this is {SCHEMA_VERSION}")
    return spec


def open_runs(store: Store, run: str, model_dir: str) -> Runs:
    """The worker's first run. Raises BadInput, naming the field, for a model of another target."""
    spec = read_spec(store, run)
    tokenizer = load_tokenizer(model_dir)
    found = tokenizer_sha256(model_dir)
    if found != spec.target.tokenizer_sha256:
        raise BadInput(
            f"{model_dir}: target.tokenizer_sha256 is {found[:12]}..., run {run!r} wants "
            f"{spec.target.tokenizer_sha256[:12]}...: pass the folder of {spec.target.name}"
        )
    return Runs(store, spec, tokenizer)
