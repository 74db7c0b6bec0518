"""docs/failures.md names tests: they exist, and no fault test is left out of it."""

from __future__ import annotations

import re

from tests.faults.processes import ROOT

FAILURES = ROOT / "docs" / "failures.md"
TESTS = ROOT / "tests"
ABOUT_THE_TESTS = {"test_docs.py", "test_harness.py", "test_schedule.py"}


def test_every_test_that_the_table_of_failures_names_exists() -> None:
    named = _named()

    assert len(named) > 30
    assert [test for test in named if test not in _defined()] == []


def test_every_fault_test_is_in_the_table_of_failures() -> None:
    missing = {
        test
        for test in _defined()
        if test.startswith("faults/") and test.split("/")[1].split("::")[0] not in ABOUT_THE_TESTS
    }

    assert missing - _named() == set()


def _named() -> set[str]:
    """As "<folder>/<file>::<function>"."""
    found = re.findall(r"`((?:\w+/)*)(test_\w+\.py::test_\w+)`", FAILURES.read_text())
    return {f"{folder or 'faults/'}{test}" for folder, test in found}


def _defined() -> set[str]:
    return {
        f"{path.relative_to(TESTS)}::{name}"
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
