"""effective.py: a setting that is not what was asked for is named, with both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_workers.contract.errors import EngineFailed
from dflash_workers.node.effective import check_model, find_differences


def told(argv: str, **info: Any) -> list[str]:
    command = ["python", "-m", "sglang.launch_server", *argv.split()]
    return [str(difference) for difference in find_differences(command, info)]


@pytest.mark.parametrize(
    ("argv", "info"),
    [
        ("--max-running-requests 48", {"max_running_requests": 48}),
        ("--hicache-ratio 2", {"hicache_ratio": 2.0}),
        ("--enable-hierarchical-cache", {"enable_hierarchical_cache": True}),
        ("--speculative-algorithm eagle", {"speculative_algorithm": "EAGLE"}),
        ("--dtype auto", {"dtype": "bfloat16"}),
        ("--cuda-graph-max-bs 48", {"cuda_graph_max_bs_decode": 48}),
        ("--mamba-scheduler-strategy extra_buffer", {"mamba_radix_cache_strategy": "extra_buffer"}),
        ("--tp 2", {"tp_size": 2}),
        ("--cuda-graph-bs 1 2 4", {"cuda_graph_bs": [1, 2, 4]}),
        ("--port 1 --port=2", {"port": 2}),
    ],
)
def test_settings_that_were_taken_are_not_mentioned(argv: str, info: dict[str, Any]) -> None:
    assert told(argv, **info) == []


@pytest.mark.parametrize(
    ("argv", "info", "line"),
    [
        (
            "--mamba-scheduler-strategy extra_buffer",
            {"mamba_scheduler_strategy": "no_buffer"},
            "--mamba-scheduler-strategy was asked to be extra_buffer and is no_buffer",
        ),
        (
            "--enable-hierarchical-cache",
            {"enable_hierarchical_cache": False},
            "--enable-hierarchical-cache was asked to be set and is False",
        ),
        (
            "--hicache-ratio 2",
            {"hicache_ratio": None},
            "--hicache-ratio was asked to be 2 and is None",
        ),
        ("--new-flag 1", {}, "--new-flag was asked to be 1 and is not told by /server_info"),
    ],
)
def test_a_setting_that_was_overridden_is_named_with_both_values(
    argv: str, info: dict[str, Any], line: str
) -> None:
    assert told(argv, **info) == [line]


def test_what_memory_left_of_the_limit_is_told() -> None:
    found = told(
        "--max-running-requests 48",
        max_running_requests=48,
        internal_states=[{"effective_max_running_requests_per_dp": 17}],
    )

    assert found == ["--max-running-requests was asked to be 48 and is 17, for want of memory"]


def test_the_schedulers_own_settings_win_over_the_command_lines() -> None:
    found = told("--page-size 16", page_size=16, internal_states=[{"page_size": 1}])

    assert found == ["--page-size was asked to be 16 and is 1"]


def test_a_server_with_another_model_is_not_taken_for_ours(tmp_path: Path) -> None:
    check_model({"model_path": str(tmp_path / "." / "x" / "..")}, tmp_path)
    check_model({}, tmp_path)

    with pytest.raises(EngineFailed, match="it serves /models/other"):
        check_model({"model_path": "/models/other"}, tmp_path)
