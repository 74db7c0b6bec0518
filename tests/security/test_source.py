"""What must not stand anywhere in the source: ways by which data become code."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import celeryconfig

ROOT = Path(__file__).parents[2]
OURS = ("benchmarks", "dflash_workers", "examples", "producer", "tests", "trainer")

# Each of them runs what a file or a message says while it reads it.
UNPICKLERS = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "pickle", "shelve"}
# Processes that this one forks or spawns itself hand each other rows through pipes, pickled by the
# standard library, or add to shared numbers; nothing from outside comes in there.
MAY_FORK = {
    "producer/crew.py",
    "trainer/tokens/counters.py",
    "trainer/tokens/whole_run.py",
    "benchmarks/growth.py",
    "benchmarks/paired/processes.py",
    "benchmarks/replay/crowd.py",
    "benchmarks/replay/players.py",
}
RUN_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}

Rule = Callable[[ast.Call], bool]
Node = ast.Call | ast.Import | ast.ImportFrom


@functools.cache
def every_node() -> dict[str, list[Node]]:
    """Calls and imports by file, from the root."""
    paths = [*ROOT.glob("*.py"), *(p for folder in OURS for p in (ROOT / folder).rglob("*.py"))]
    return {
        str(path.relative_to(ROOT)): [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, Node)
        ]
        for path in sorted(paths)
    }


def nodes(*, with_tests: bool = True) -> Iterator[tuple[str, Node]]:
    for name, found in every_node().items():
        if with_tests or not name.startswith("tests/"):
            yield from ((name, node) for node in found)


def calls_where(holds: Rule, *, with_tests: bool = True) -> list[str]:
    return [
        f"{name}:{node.lineno}"
        for name, node in nodes(with_tests=with_tests)
        if isinstance(node, ast.Call) and holds(node)
    ]


def name_of(call: ast.Call) -> str:
    """`torch.load` of `torch.load(path)`."""
    return ast.unparse(call.func)


def gives(call: ast.Call, keyword: str, value: object) -> bool:
    return any(
        k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value == value
        for k in call.keywords
    )


def test_nothing_is_unpickled() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, node in nodes()
        if not isinstance(node, ast.Call)
        for module in _modules(node)
        if module in UNPICKLERS
    ]

    assert found == []


def test_only_known_modules_share_with_processes_through_multiprocessing() -> None:
    found = {
        name
        for name, node in nodes(with_tests=False)
        if not isinstance(node, ast.Call) and "multiprocessing" in _modules(node)
    }

    assert found - MAY_FORK == set()


def test_tensors_and_arrays_are_read_without_unpickling() -> None:
    def unpickles(call: ast.Call) -> bool:
        is_torch = name_of(call) == "torch.load" and not gives(call, "weights_only", True)
        return is_torch or gives(call, "allow_pickle", True) or gives(call, "weights_only", False)

    assert calls_where(unpickles) == []


def test_no_code_of_a_model_is_trusted_and_no_weights_but_safetensors_are_taken() -> None:
    def trusts(call: ast.Call) -> bool:
        names = {k.arg for k in call.keywords} & {"trust_remote_code"}
        is_trusting = names and not gives(call, "trust_remote_code", False)
        return bool(is_trusting) or gives(call, "use_safetensors", False)

    assert calls_where(trusts) == []


def test_no_text_is_run() -> None:
    def runs_text(call: ast.Call) -> bool:
        is_builtin = isinstance(call.func, ast.Name) and call.func.id in RUN_TEXT
        return (
            is_builtin or name_of(call) in {"os.system", "os.popen"} or gives(call, "shell", True)
        )

    assert calls_where(runs_text, with_tests=False) == []


def test_yaml_is_read_as_data() -> None:
    def builds_objects(call: ast.Call) -> bool:
        return name_of(call) in {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"}

    assert calls_where(builds_objects) == []


def test_no_certificate_goes_unchecked() -> None:
    def trusts_anybody(call: ast.Call) -> bool:
        return any(
            gives(call, keyword, value)
            for keyword, value in (
                ("verify", False),
                ("verify_ssl", False),
                ("ssl", False),
                ("ssl_cert_reqs", None),
                ("ssl_cert_reqs", "none"),
            )
        )

    assert calls_where(trusts_anybody, with_tests=False) == []


def test_messages_are_json_and_nothing_else() -> None:
    assert celeryconfig.accept_content == ["json"]
    assert celeryconfig.task_serializer == "json"


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
    return [name.partition(".")[0] for name in names if name]
