"""What the documents say can be done: commands are parsed, links followed, tables held to records.

Every command of a code block is parsed by the command itself, and is run by some test, or marked
here as one that needs what no test has.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_workers.contract.records import Answer, Commit, Row
from tests.commands import check_command
from tests.programs import program
from trainer.tokens.shards import COLUMNS

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.md")])
HISTORY = {"CHANGELOG.md"}  # says what was

# Where a verb of the documents is run as a command, below tests/; what needs more than a test has.
RUN_BY = {
    "audit": "security/hardened_run.py",
    "bench": "dflash_workers/test_cli_bench.py",
    "cancel": "producer/cli/test_runs.py",
    "demo": "test_demo.py",
    "drift": "trainer/cli/test_tokens.py",
    "enqueue": "security/hardened_run.py",
    "estimate": "dflash_workers/test_cli_bench.py",
    "evaluate": "trainer/cli/test_drafter.py",
    "export": "trainer/cli/test_drafter.py",
    "exporter": "dflash_workers/test_cli_exporter.py",
    "flower": "security/hardened_run.py",
    "gate": "trainer/cli/test_gate.py",
    "gc": "producer/cli/test_runs.py",
    "import": "producer/cli/test_fates.py",
    "node leave": "dflash_workers/node/test_machine.py",
    "node logs": "dflash_workers/node/test_machine.py",
    "node start": "dflash_workers/node/conftest.py",
    "node status": "dflash_workers/node/test_machine.py",
    "node stop": "dflash_workers/test_cli_node.py",
    "parity": "trainer/cli/test_drafter.py",
    "pause": "producer/cli/test_runs.py",
    "report": "security/hardened_run.py",
    "promote": "dflash_workers/test_cli_promote.py",
    "drafters": "dflash_workers/test_cli_promote.py",
    "pull": "producer/cli/test_fates.py",
    "reconcile": "producer/cli/test_runs.py",
    "rejected": "security/hardened_run.py",
    "resume": "producer/cli/test_runs.py",
    "retry": "producer/cli/test_fates.py",
    "runs": "security/hardened_run.py",
    "seal": "producer/cli/test_runs.py",
    "show": "trainer/cli/test_gate.py",
    "status": "security/hardened_run.py",
    "tokenize": "security/hardened_run.py",
    "train": "trainer/cli/test_drafter.py",
    "worker": "security/hardened_run.py",
}
# What people fill in, as something that a flag takes.
FILLED_IN = {"N": "1", "R": "run", "FILE": "prompts.jsonl", "RULE": "loops", "NAME": "name"}
NOT_A_VERB = {"VERB"}


def commands_of(text: str) -> Iterator[list[str]]:
    """What follows `dflash-fleet` in code, in a block or between backticks."""
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    inline = re.findall(
        r"`([^`\n]*dflash-fleet [^`\n]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    )
    for code in [*blocks, *inline]:
        for line in re.sub(r"\\\n\s*", "", code).splitlines():
            found = re.search(r"(?:^|\s)dflash-fleet ([^#]+)", line)
            if found and not re.search(r"[─━]", line):
                yield from _alternatives(shlex.split(found[1]))


def _alternatives(words: list[str]) -> Iterator[list[str]]:
    """`pause | resume --run R` is two commands with the same flags."""
    *others, words = "\n".join(words).split("\n|\n")
    verb, *flags = words.split("\n")
    for name in [*others, verb]:
        yield [*name.split("\n"), *(FILLED_IN.get(flag, flag) for flag in flags)]


def test_a_command_is_found_wherever_it_stands() -> None:
    block = "```\nls\ndflash-fleet pause | resume --run b # so\n```\n"
    text = f"Say `X=1 dflash-fleet pause --run R`.\n{block}"

    assert sorted(commands_of(text)) == [
        ["pause", "--run", "b"],
        ["pause", "--run", "run"],
        ["resume", "--run", "b"],
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_is_one_that_there_is_and_that_a_test_runs(path: Path) -> None:
    for words in commands_of(path.read_text()):
        if words[0] in NOT_A_VERB or path.name in HISTORY:
            continue
        try:
            name = check_command(words) if words[0] != "--help" else ""
        except Exception as error:
            pytest.fail(f"dflash-fleet {shlex.join(words)}: {error}")
        assert name in RUN_BY, f"no test is named that runs `dflash-fleet {name}`"


@pytest.mark.parametrize("verb", RUN_BY)
def test_the_test_that_is_named_runs_the_verb(verb: str) -> None:
    text = (TESTS / RUN_BY[verb]).read_text()

    assert any(f'"{word}"' in text for word in verb.split()), f"{RUN_BY[verb]}: no {verb!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_make_target_is_one_of_the_makefiles(path: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert set(re.findall(r"[`\n]make (\w+)", path.read_text())) <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for place in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"https?://", place):
            continue
        name, _, anchor = place.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), place
        if anchor and there.suffix == ".md":
            assert anchor in _anchors(there.read_text()), place


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_test_that_the_operators_table_names_exists() -> None:
    text = (DOCS / "operations.md").read_text().partition("## When something is wrong")[2]
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]

    assert len(named) >= len(rows) > 10
    for file, name in named:
        assert f"\ndef {name}(" in (TESTS / file).read_text(), f"{file}::{name}"


@pytest.mark.parametrize("record", [Row, Answer, Commit], ids=lambda record: record.__name__)
def test_the_table_of_a_record_has_its_fields(record: type) -> None:
    names = {field.name for field in dataclasses.fields(record)}

    assert _table(f"field of `{record.__name__}`") == names


def test_the_table_of_a_shard_has_its_columns() -> None:
    assert _table("column") == set(COLUMNS)


def _table(title: str) -> set[str]:
    """Names in the first column of the table in formats.md whose first heading this is."""
    text = (DOCS / "formats.md").read_text()
    lines = text.partition(f"| {title} |")[2].splitlines()[2:]
    rows = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), None)]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [program("mkdocs"), "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    pages = {page.stem for page in (tmp_path / "site").glob("*.html")} - {"404"}
    assert pages == {page.stem for page in DOCS.glob("*.md")}
    assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', _all_html(tmp_path))


def _all_html(folder: Path) -> str:
    return "".join(page.read_text() for page in folder.rglob("*.html"))
