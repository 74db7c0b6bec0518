"""A run's fingerprint: every value explicit, written once, another refused by the field's name."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput, Conflict, Missing
from dflash_workers.contract.keys import RunKeys
from dflash_workers.contract.lines import load
from dflash_workers.contract.records import RunSpec, Sampling
from dflash_workers.contract.store import Store
from producer.fingerprint import (
    RunOptions,
    find_spec,
    make_spec,
    open_or_create_run,
)
from tests.tiny_model import (
    CONTEXT_LEN,
    TEMPLATE,
    VOCAB_SIZE,
    make_tiny_model,
)

ROOT = Path(__file__).parents[2]

OTHER = "{{ messages[-1].content }}"  # a template that is not the model's


def spec_of(folder: Path, options: RunOptions = RunOptions()) -> RunSpec:  # noqa: B008
    return make_spec("r", str(folder), options, None)


@pytest.fixture
def own_model(tmp_path: Path, model_dir: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(model_dir, tmp_path / "own"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_every_value_of_the_model_is_explicit(model_dir: Path) -> None:
    spec = spec_of(model_dir)

    assert spec.sampling == Sampling(0.6, 0.95, 20, 2048, [0, 2])
    assert (spec.target.vocab_size, spec.target.context_len) == (VOCAB_SIZE, CONTEXT_LEN)
    assert (spec.target.name, spec.target.dtype) == ("tiny", "float32")
    assert (spec.chat_template, spec.multi_turn) == (TEMPLATE, "rollout")
    assert spec.thinking_end_id == 371


def test_without_a_generation_config_nothing_limits_sampling(own_model: Path) -> None:
    (own_model / "generation_config.json").unlink()

    assert spec_of(own_model).sampling == Sampling(1.0, 1.0, -1, 2048, [2])


def test_options_go_before_the_run_and_the_run_before_the_model(model_dir: Path) -> None:
    standing = spec_of(model_dir, RunOptions(max_new_tokens=7, template_kwargs={"x": 1}))

    spec = make_spec("r", str(model_dir), RunOptions(temperature=0.0), standing)

    assert spec.sampling == Sampling(0.0, 0.95, 20, 7, [0, 2])
    assert spec.template_kwargs == {"x": 1}


def test_a_moved_model_is_the_same_target_and_a_changed_one_is_not(
    own_model: Path, model_dir: Path
) -> None:
    fingerprint = spec_of(model_dir).target.fingerprint()
    assert spec_of(own_model).target.fingerprint() == fingerprint

    weights = own_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    changed_weights = spec_of(own_model).target.fingerprint()
    edit(own_model / "config.json", rope_theta=1)
    changed_config = spec_of(own_model).target.fingerprint()
    changed_template = spec_of(own_model, RunOptions(chat_template=OTHER)).target.fingerprint()

    assert len({fingerprint, changed_weights, changed_config, changed_template}) == 4


def test_a_real_model_with_nested_text_config_is_understood(own_model: Path) -> None:
    path = own_model / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "qwen3", "text_config": config}))

    assert spec_of(own_model).target.context_len == CONTEXT_LEN


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda folder: shutil.rmtree(folder), Missing, "no model folder"),
        (lambda folder: (folder / "config.json").unlink(), Missing, "config.json"),
        (lambda folder: (folder / "tokenizer.json").unlink(), Missing, "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), Missing, "safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"GGUF"), BadInput, "complete"),
        (lambda folder: (folder / "config.json").write_text("{"), BadInput, "not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), BadInput, "vocab_size"),
    ],
)
def test_a_folder_that_is_no_model_is_refused_in_clear_words(
    own_model: Path, damage: Callable[[Path], object], error: type[Exception], words: str
) -> None:
    damage(own_model)

    with pytest.raises(error, match=words):
        spec_of(own_model, RunOptions(chat_template=TEMPLATE))


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(temperature=-1.0),
        RunOptions(temperature=float("nan")),
        RunOptions(top_p=0.0),
        RunOptions(top_k=-2),
        RunOptions(max_new_tokens=0),
        RunOptions(max_new_tokens=CONTEXT_LEN),
    ],
)
def test_sampling_out_of_range_is_refused(model_dir: Path, options: RunOptions) -> None:
    with pytest.raises(BadInput, match="out of range"):
        spec_of(model_dir, options)


def test_a_runs_fingerprint_is_written_once_and_another_is_refused_by_field(
    store: Store, model_dir: Path
) -> None:
    spec = spec_of(model_dir)
    other = spec_of(model_dir, RunOptions(max_new_tokens=16))

    assert open_or_create_run(store, spec) == spec
    assert open_or_create_run(store, spec) == spec
    with pytest.raises(Conflict, match=r"sampling\.max_new_tokens is 2048 there and 16 here"):
        open_or_create_run(store, other)

    assert load(RunSpec, store.get(RunKeys("r").spec)) == spec


def test_the_targets_name_is_for_people_and_may_differ(store: Store, model_dir: Path) -> None:
    spec = spec_of(model_dir)
    moved = dataclasses.replace(spec, target=dataclasses.replace(spec.target, name="elsewhere"))
    open_or_create_run(store, spec)

    assert open_or_create_run(store, moved) == spec


def test_a_long_value_is_shown_short(store: Store, model_dir: Path, tmp_path: Path) -> None:
    open_or_create_run(store, spec_of(model_dir))
    other = spec_of(
        make_tiny_model(tmp_path / "m"),
        RunOptions(chat_template="x" * 10_000 + OTHER),
    )

    with pytest.raises(Conflict) as refused:
        open_or_create_run(store, other)

    assert "target.template_sha256" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("template", ["", "{{ 1/0 }}", "{% for x in %}", "no question in it"])
def test_a_template_that_can_not_ask_is_refused_before_a_run_has_it(
    model_dir: Path, template: str
) -> None:
    with pytest.raises(BadInput, match="template"):
        spec_of(model_dir, RunOptions(chat_template=template))


def test_the_policies_are_the_calls_or_the_runs_or_the_default(model_dir: Path) -> None:
    default = spec_of(model_dir)
    standing = spec_of(model_dir, RunOptions(multi_turn="strip", control_tokens="keep"))

    again = make_spec("r", str(model_dir), RunOptions(), standing)
    changed = make_spec("r", str(model_dir), RunOptions(multi_turn="last"), standing)

    assert (default.multi_turn, default.control_tokens) == ("rollout", "escape")
    assert again == standing
    assert (changed.multi_turn, changed.control_tokens) == ("last", "keep")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions(multi_turn="all"), "multi_turn is 'all': use one of rollout, strip"),
        (RunOptions(multi_turn=""), "multi_turn is ''"),
        (RunOptions(control_tokens="drop"), "control_tokens is 'drop': use one of escape, reject"),
    ],
)
def test_an_unknown_policy_is_refused(model_dir: Path, options: RunOptions, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        spec_of(model_dir, options)


@pytest.mark.parametrize("field", ["multi_turn", "control_tokens"])
def test_another_policy_than_the_runs_is_refused_by_field(
    store: Store, model_dir: Path, field: str
) -> None:
    open_or_create_run(store, spec_of(model_dir))
    other = {"multi_turn": "strip", "control_tokens": "keep"}[field]

    with pytest.raises(Conflict, match=rf"{field} is '\w+' there and '{other}' here"):
        open_or_create_run(store, dataclasses.replace(spec_of(model_dir), **{field: other}))


@pytest.mark.parametrize("is_thinking", [True, False])
def test_a_thinking_mode_that_the_template_ignores_is_refused(
    model_dir: Path, is_thinking: bool
) -> None:
    kwargs = {"enable_thinking": is_thinking}

    assert spec_of(model_dir, RunOptions(template_kwargs=kwargs)).template_kwargs == kwargs
    with pytest.raises(BadInput, match="enable_thinking"):
        spec_of(model_dir, RunOptions(chat_template=OTHER, template_kwargs=kwargs))


def test_a_run_that_does_not_exist_is_none(store: Store, model_dir: Path) -> None:
    assert find_spec(store, "r") is None

    spec = open_or_create_run(store, spec_of(model_dir))

    assert find_spec(store, "r") == spec


def test_making_a_spec_needs_no_torch(model_dir: Path) -> None:
    program = f"""
import sys
import producer.api
from producer.fingerprint import RunOptions, make_spec
spec = make_spec("r", {str(model_dir)!r}, RunOptions(), None)
print(spec.target.name, "torch" in sys.modules)
"""

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["tiny", "False"]
