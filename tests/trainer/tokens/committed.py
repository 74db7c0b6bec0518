"""Rows and commits as workers would write them, without the workers."""

from __future__ import annotations

from dflash_workers.contract.commit import publish, seal_rows
from dflash_workers.contract.flags import TRUNCATED
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    Row,
    RunSpec,
    Sampling,
    Target,
)
from dflash_workers.contract.store import Store

RUN = "run"
KEYS = RunKeys(RUN)
STOP, THINK_END = 2, 90

SPEC = RunSpec(
    schema=SCHEMA_VERSION,
    run=RUN,
    target=Target("tiny", "c" * 64, "k" * 64, "m" * 64, "w" * 64, 1000, 4096, "float32"),
    chat_template="",
    template_kwargs={},
    sampling=Sampling(0.0, 1.0, -1, 64, [STOP]),
    multi_turn="rollout",
    control_tokens="escape",
    thinking_end_id=THINK_END,
)


def make_answer(
    input_ids: list[int], output_ids: list[int], turn: int = 0, flags: tuple[str, ...] = ()
) -> Answer:
    finish_reason = "stop" if output_ids[-1:] == [STOP] else "length"
    return Answer(
        *(turn, input_ids, output_ids, [len(output_ids)], "text is for people", "", []),
        *(finish_reason, 0, 0.1, 7, {}, list(flags)),
    )


def make_row(*answers: Answer, name: str = "math-1", heldout: bool = False) -> Row:
    return Row(name.ljust(32, "0"), name, 0, heldout, "p.jsonl:1", [], [], list(answers))


def commit_rows(
    store: Store, batch: str, rows: list[Row], segment: int = 1, road: str = "ids"
) -> Commit:
    body, sha256 = seal_rows(rows)
    data_key = KEYS.data(segment, batch, "att")
    commit = Commit(
        *(1, RUN, segment, batch, "att", data_key, sha256, len(body), len(rows), []),
        *(0, 0, 0.0, 1.0, "w", {}, road),
    )
    return publish(store, commit, body)


THREE_TURNS = make_row(
    make_answer([10, 11], [20, 21, STOP], turn=0),
    # Not a continuation of the turn before: the template has dropped and changed some ids.
    make_answer([10, 11, 20, 99, 12], [22, STOP], turn=1),
    make_answer([10, 11, 20, 99, 12, 22, 13], [23, 24, 25], turn=2, flags=(TRUNCATED,)),
)
