"""Where held-out prompts come from, by a plan as a producer writes it."""

from __future__ import annotations

import pytest

from dflash_workers.contract.hints import Hints
from dflash_workers.contract.records import SCHEMA_VERSION, RunSpec, Sampling, Target
from dflash_workers.contract.store import Store
from tests.planned import Plan, prompt
from trainer.heldout import UNKNOWN, HeldOut, place_of

SPEC = RunSpec(
    SCHEMA_VERSION,
    "maths",
    Target("tiny", "", "", "", "", 512, 512, "float32"),
    "",
    {},
    Sampling(0.0, 1.0, -1, 20, [2, 5]),
    "rollout",
    "escape",
)


def test_a_prompts_source_is_the_file_that_the_plan_names(store: Store, hints: Hints) -> None:
    wanted = [prompt("one", source="s3://b/maths.jsonl:17"), prompt("two", source="code.arrow#4")]
    other = prompt("three", source="never.jsonl:1")
    plan = Plan(store, hints, SPEC)
    plan.add([wanted[0], other])
    plan.add([prompt("four")], [wanted[1]])

    found = HeldOut(store, SPEC, []).sources({wanted[0].key, wanted[1].key, "f" * 32})

    assert found == {
        wanted[0].key: "s3://b/maths.jsonl",
        wanted[1].key: "code.arrow",
        "f" * 32: UNKNOWN,
    }


def test_only_batches_that_hold_one_are_read(
    store: Store, hints: Hints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, wanted = Plan(store, hints, SPEC), prompt("one")
    plan.add([prompt("zero")], [wanted], [prompt("two")])
    ranges: list[str] = []
    read = Store.get_range

    def counted(self: Store, key: str, offset: int, num_bytes: int) -> bytes:
        ranges.append(key)
        return read(self, key, offset, num_bytes)

    monkeypatch.setattr(Store, "get_range", counted)

    HeldOut(store, SPEC, []).sources({wanted.key})

    assert len(ranges) == 1


def test_the_runs_stop_ids_end_replies(store: Store) -> None:
    assert HeldOut(store, SPEC, []).stop_ids == {2, 5}


@pytest.mark.parametrize(
    ("source", "place"),
    [("a.jsonl:7", "a.jsonl"), ("a#12", "a"), ("data/2024", "data/2024"), ("x", "x"), ("7", "7")],
)
def test_a_place_is_a_source_without_its_line(source: str, place: str) -> None:
    assert place_of(source) == place
