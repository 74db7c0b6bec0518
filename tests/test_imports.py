"""The arrows between packages, read from the source of every module, deferred imports included."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"celeryconfig", "demo", "dflash_workers", "fleet", "producer", "trainer"}
CONTRACT = "dflash_workers.contract"

# What a module of each place may import of ours; the first prefix that fits a module decides.
MAY_IMPORT = {
    CONTRACT: {CONTRACT, "celeryconfig"},
    "dflash_workers": {"dflash_workers", "celeryconfig"},
    "producer": {"producer", CONTRACT, "celeryconfig"},
    "trainer": {"trainer", CONTRACT, "celeryconfig"},
    "celeryconfig": set[str](),
    "demo": {"dflash_workers", "producer", "trainer"},
    "fleet": {"dflash_workers", "producer", "trainer", "demo"},
}


def our_modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.glob("*.py")) + sorted(
        p
        for package in ("dflash_workers", "producer", "trainer")
        for p in (ROOT / package).rglob("*.py")
    ):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if (
            "cpu_engine" not in name
        ):  # runs inside the engine's interpreter, imports nothing of ours
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def test_imports_go_one_way() -> None:
    wrong = []

    for module, tree in our_modules():
        allowed = next(places for prefix, places in MAY_IMPORT.items() if within(module, prefix))
        for imported, line in imports_of(tree):
            if imported.split(".")[0] in OURS and not any(within(imported, p) for p in allowed):
                wrong.append(f"{module}:{line} imports {imported}")

    assert wrong == []


def test_our_modules_are_imported_at_the_top_of_a_file() -> None:
    wrong = []

    for module, tree in our_modules():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                wrong += [
                    f"{module}:{line} imports {imported}"
                    for imported, line in imports_of(function)
                    if imported.split(".")[0] in OURS
                ]

    assert wrong == []


def test_no_cycle_between_modules() -> None:
    trees = dict(our_modules())
    graph = {
        module: {
            other
            for imported, _ in imports_of(tree)
            for other in (imported, imported.rpartition(".")[0])
            if other in trees and other != module
        }
        for module, tree in trees.items()
    }

    while leaves := [module for module, others in graph.items() if not others & graph.keys()]:
        for leaf in leaves:
            del graph[leaf]

    assert graph == {}


@pytest.mark.parametrize("module", ["records", "keys", "errors"])
def test_the_vocabulary_needs_only_the_standard_library(module: str) -> None:
    tree = dict(our_modules())[f"{CONTRACT}.{module}"]

    foreign = {
        imported
        for imported, _ in imports_of(tree)
        if imported.split(".")[0] not in sys.stdlib_module_names and not within(imported, CONTRACT)
    }

    assert foreign == set()


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (CONTRACT + ".records", ["boto3", "celery", "torch", "transformers"]),
        (CONTRACT + ".commit", ["celery", "torch", "transformers"]),
        ("producer.plan", ["torch"]),
        ("producer.api", ["torch", "transformers"]),
        ("dflash_workers.tasks", ["torch", "sglang"]),
        ("trainer.tokens.build", ["torch", "celery"]),
        ("fleet", ["torch"]),
    ],
)
def test_importing_a_module_does_not_load_what_it_has_no_use_for(
    module: str, unwanted: list[str]
) -> None:
    program = f"import sys, {module}; print([m for m in {unwanted!r} if m in sys.modules])"

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "[]"


def test_no_module_is_named_after_one_of_the_standard_library() -> None:
    names = {module.rpartition(".")[2] for module, _ in our_modules()}

    assert names & set(sys.stdlib_module_names) == set()


def test_every_module_says_what_it_is() -> None:
    silent = [module for module, tree in our_modules() if not ast.get_docstring(tree)]

    assert silent == []
