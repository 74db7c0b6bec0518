from __future__ import annotations

import dataclasses

import orjson
import pytest

from dflash_workers.contract.errors import BadInput, Conflict
from dflash_workers.contract.provenance import MADE_WITH, check_made_with, made_with, may_differ
from dflash_workers.contract.records import RunSpec, Sampling, Target

SPEC = RunSpec(
    schema=1,
    run="maths",
    target=Target("tiny", "c", "k", "t", "w", vocab_size=9, context_len=64, dtype="bfloat16"),
    chat_template="{{ messages }}",
    template_kwargs={"enable_thinking": True},
    sampling=Sampling(0.7, 1.0, -1, 64, [2]),
    multi_turn="rollout",
    control_tokens="escape",
)
OF_THIS_RUN = orjson.loads(orjson.dumps({MADE_WITH: made_with(SPEC)}))


def test_a_drafter_of_the_same_target_under_another_name_and_run_is_served() -> None:
    target = dataclasses.replace(SPEC.target, name="a copy")
    other = dataclasses.replace(SPEC, run="code", target=target)

    check_made_with(OF_THIS_RUN, other, "fast")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"template_kwargs": {"enable_thinking": False}}, "template_kwargs.enable_thinking"),
        ({"template_kwargs": {}}, "template_kwargs"),
        ({"chat_template": "{{ other }}"}, "chat_template_sha256"),
        ({"target": dataclasses.replace(SPEC.target, dtype="fp8")}, "target.dtype"),
        ({"target": dataclasses.replace(SPEC.target, weights_sha256="x")}, "weights_sha256"),
    ],
)
def test_another_target_precision_template_or_thinking_mode_is_refused_by_name(
    change: dict[str, object], named: str
) -> None:
    spec = dataclasses.replace(SPEC, **change)  # type: ignore[arg-type]

    with pytest.raises(Conflict, match=named):
        check_made_with(OF_THIS_RUN, spec, "fast")


def test_one_that_does_not_say_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_made_with({}, SPEC, "theirs")

    assert "theirs does not say which target" in caplog.text


def test_only_the_target_can_be_overridden() -> None:
    assert may_differ(["target"])
    assert not may_differ([])
    with pytest.raises(BadInput, match="gate"):
        may_differ(["gate"])
