"""Which engine runs what was trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import Json
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.engines import ENGINES, NEWEST, check_served, find_engine
from trainer.drafter.export import check_target, export_drafter, lint
from trainer.drafter.model import Drafter

WINDOWS: Json = {"layer_types": [SLIDING, FULL]}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5}


def served_by(config: Json) -> set[str]:
    """The engines that take it."""
    found = set()
    for name, engine in ENGINES.items():
        try:
            check_served(config, engine)
        except BadInput:
            continue
        found.add(name)
    return found


@pytest.mark.parametrize(
    ("config", "refused_by"),
    [
        ({"layer_types": [FULL, FULL]}, set()),
        (WINDOWS, set()),
        (WINDOWS | {"is_causal": True}, set()),
        (WINDOWS | {"is_causal": False}, {"sglang==0.5.17"}),
        ({"layer_types": [FULL], "is_causal": False}, set()),
        ({"rope_scaling": PARTIAL}, set(ENGINES) - {"vllm==0.33.0"}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, set()),
        ({"markov_rank": 64}, {"vllm==0.33.0", "dflash==0.1.0"}),
    ],
)
def test_an_engine_that_would_compute_something_else_refuses(
    config: Json, refused_by: set[str]
) -> None:
    assert set(ENGINES) - served_by(config) == refused_by


def test_all_reasons_are_named_at_once() -> None:
    config = WINDOWS | {"is_causal": False, "rope_scaling": PARTIAL}

    with pytest.raises(BadInput, match=r"look ahead .*; it rotates a part .* --for"):
        check_served(config, ENGINES["sglang==0.5.17"])


def test_an_engine_that_nobody_looked_into_is_refused() -> None:
    with pytest.raises(BadInput, match=r"sglang==0\.5\.17"):
        find_engine("sglang==9.9.9")


def test_an_export_is_refused_for_one_engine_and_written_for_another(
    small_config: DrafterConfig, tmp_path: Path
) -> None:
    drafter = Drafter(dataclasses.replace(small_config, rope_scaling=PARTIAL))

    with pytest.raises(BadInput, match="whole heads"):
        export_drafter(drafter, tmp_path / "out", provenance={}, engine=NEWEST)
    assert not list(tmp_path.iterdir())
    export_drafter(drafter, tmp_path / "out", provenance={}, engine="vllm==0.33.0")

    assert lint(tmp_path / "out") == drafter.config
    with pytest.raises(BadInput):
        lint(tmp_path / "out", "sglang==0.5.17")


def test_another_targets_drafter_is_refused_with_what_differs(small_config: DrafterConfig) -> None:
    check_target(small_config, SimpleNamespace(hidden_size=32, vocab_size=512, num_hidden_layers=5))

    with pytest.raises(BadInput, match="vocab_size 512, not 600; layers 5, not 6"):
        check_target(
            small_config, SimpleNamespace(hidden_size=32, vocab_size=600, num_hidden_layers=6)
        )
