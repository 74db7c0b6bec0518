"""How one call reads: options and a target in, the outcomes of its rows out.

Used by api.py for a run and, in memory only, for a dry run. Puts in line what stands between files
and plan: sources/ -> crew.py (candidates.py) -> dedup.py -> shuffle.py -> preflight.py -> plan.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import celeryconfig
from dflash_workers.contract.chat import Chat, open_chat
from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import RunSpec
from dflash_workers.contract.settings import Settings
from producer.abilities import probe_abilities
from producer.candidates import Outcome
from producer.context import ContextCheck
from producer.crew import read_in_parallel
from producer.dedup import without_same_content
from producer.drafts import PlanOptions
from producer.fingerprint import DEFAULT_POLICIES, RunOptions, make_spec
from producer.known import KnownLines
from producer.limits import Limits
from producer.plan import Survey, survey
from producer.preflight import check_share, checked
from producer.rules import Draws, Rules
from producer.schemas import Shape
from producer.segments import PlanLog
from producer.shuffle import shuffled
from producer.sources.inputs import Input, Piece, read_items, read_pieces

Inputs = str | Path | Iterable[Input]


@dataclass(frozen=True, slots=True)
class EnqueueOptions:
    """How one call reads rows and plans them."""

    shape: Shape = field(default_factory=Shape)  # how rows are to be read
    samples: int = 1  # of each row, each with a seed of its own
    heldout: float = 0.02  # share of the rows never trained on, drawn by hash of the id
    weights: Mapping[str, float] = field(default_factory=dict)  # path -> factor on its samples
    duplicates: str = "keep-first"  # of an id: keep-first | suffix | error
    drop_same_content: bool = False  # under another id, too
    shuffle: int | None = None  # seed; None: the order of the input
    limit: int | None = None  # read the first rows only
    batch_size: int = 64  # prompts: see drafts.py
    priority: str = "normal"  # high | normal | low, against other runs of the same target
    max_bad: float = 1.0  # share of refused rows beyond which nothing is planned
    max_queued: int | None = None  # hints in the queue to wait at

    def __post_init__(self) -> None:
        check_share(self.max_bad)
        Draws(self.samples, self.weights, self.heldout)
        if self.priority not in celeryconfig.PRIORITIES:
            names = ", ".join(celeryconfig.PRIORITIES)
            raise BadInput(f"priority {self.priority!r} is none of {names}")

    def rules(self, multi_turn: str, limits: Limits) -> Rules:
        """What decides a row's outcome."""
        return Rules(
            shape=self.shape,
            multi_turn=multi_turn,
            limits=limits,
            draws=Draws(self.samples, self.weights, self.heldout),
            duplicates=self.duplicates,
        )

    def plan_options(self) -> PlanOptions:
        """How what is new is planned."""
        notes = {
            "batch_size": self.batch_size,
            "heldout": self.heldout,
            "samples": self.samples,
            "shuffle": self.shuffle,
            "limit": self.limit,
        }
        return PlanOptions(
            batch_size=self.batch_size,
            priority=celeryconfig.PRIORITIES[self.priority],
            notes=notes,
        )


def read_outcomes(
    inputs: Inputs,
    options: EnqueueOptions,
    rules: Rules,
    settings: Settings,
    log: PlanLog,
) -> Iterator[Outcome]:
    """The fate of each row, as far as the log needn't be written to for it. Raises BadInput."""
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    _check_weights(options.weights, inputs)
    pieces: Iterator[Piece] = read_pieces(inputs, settings)
    if options.limit is not None:
        pieces = islice(read_items(inputs, settings), options.limit)
    outcomes = read_in_parallel(pieces, rules, KnownLines(log.lines))
    if options.drop_same_content:
        outcomes = without_same_content(outcomes, log)
    if options.shuffle is not None:
        outcomes = shuffled(outcomes, options.shuffle)
    refuse_duplicates = options.duplicates == "error"
    if options.max_bad < 1 or refuse_duplicates:
        outcomes = checked(outcomes, options.max_bad, refuse_duplicates=refuse_duplicates)
    return outcomes


def _check_weights(weights: Mapping[str, float], inputs: Iterable[Input]) -> None:
    """Raise BadInput for a weight of a file that is surely none of the inputs."""
    if not weights or not isinstance(inputs, Sequence):
        return
    plain = {str(given) for given in inputs if isinstance(given, str | Path)}
    if all(Path(name).is_file() for name in plain):
        for path in weights.keys() - plain:
            raise BadInput(f"a weight is given for {path!r}, which is none of the inputs")


def limits_of(spec: RunSpec, chat: Chat) -> Limits:
    """What a prompt of the run may ask for."""
    return Limits(
        max_new_tokens=spec.sampling.max_new_tokens,
        control_tokens=chat.control_tokens,
        control_policy=spec.control_tokens,
        abilities=probe_abilities(chat),
        too_long=ContextCheck(chat, spec.sampling, spec.target.context_len).excess,
    )


def preview(
    inputs: Inputs, options: EnqueueOptions, settings: Settings, run_options: RunOptions
) -> Survey:
    """What planning would do in a new run. Needs no run, Redis, S3 or model, and writes nothing.

    With a model in `settings`, its context and template are looked at, too.
    """
    limits = Limits()
    if settings.model:
        spec = make_spec(settings.run or "preview", settings.model, run_options, None)
        chat = open_chat(
            settings.model, spec.chat_template, spec.template_kwargs, spec.control_tokens
        )
        limits = limits_of(spec, chat)
    multi_turn = run_options.multi_turn or DEFAULT_POLICIES["multi_turn"]
    rules = options.rules(multi_turn, limits)
    log = PlanLog()
    outcomes = read_outcomes(inputs, options, rules, settings, log)
    return survey(log, outcomes, options.plan_options())
