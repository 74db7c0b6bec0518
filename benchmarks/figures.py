"""What a benchmark found, as one JSON line per figure and as two files.

Used by the programs beside this file. A figure says what is good: a goal, and which way is better.
Files are named by subject, hardware and month, so that a later run stands beside an earlier one.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One number."""

    figure: str  # "subject.name"
    value: float
    goal: float | None
    better: str  # higher | lower
    unit: str

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Where, with what and how figures were found."""

    machine: str
    versions: dict[str, str]
    command: str
    date: str
    commit: str  # empty outside a checkout


def circumstances(machine: str, packages: Iterable[str]) -> Circumstances:
    """Of the program that runs."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return Circumstances(
        machine=machine,
        versions={"python": platform.python_version()} | {name: version(name) for name in packages},
        command=" ".join(["python -m", _module(), *sys.argv[1:]]),
        date=datetime.now(UTC).date().isoformat(),
        commit=git.stdout.strip(),
    )


def print_figures(figures: Iterable[Figure]) -> None:
    """One JSON line each."""
    for figure in figures:
        print(json.dumps(asdict(figure)))


def write_figures(
    out: Path, name: str, title: str, figures: list[Figure], found: Circumstances, prose: str = ""
) -> Path:
    """`<name>_<yyyymm>.json` and the .md beside it, which is returned."""
    stem = f"{name}_{datetime.now(UTC):%Y%m}"
    out.mkdir(parents=True, exist_ok=True)
    facts = [asdict(figure) | asdict(found) for figure in figures]
    (out / f"{stem}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {number}" for name, number in found.versions.items())
    lines = [
        f"# {title}",
        "",
        f"{found.date}, {found.machine}, commit {found.commit[:12]}, `{found.command}`; {versions}",
        "",
        *([prose, ""] if prose else []),
        "| figure | value | goal | unit |",
        "|---|---|---|---|",
        *(f"| {f.figure} | {f.value:.4g} | {_goal(f)} | {f.unit} |" for f in figures),
        "",
    ]
    path = out / f"{stem}.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _goal(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    sign = "≥" if figure.better == "higher" else "≤"
    return f"{sign} {figure.goal:g}{'' if figure.is_met else ', missed'}"


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else sys.argv[0]
