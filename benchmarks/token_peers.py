"""Our text road beside SpecForge's and speculators' own preprocessing, on the same conversations.

Called by tokens.py. The peers come from PyPI into a venv that is thrown away. It sees this
environment's packages, so that all three use the same torch, transformers and tokenizers (the peers
pin older ones); what else they ask for is installed as far as their preprocessing imports it, which
leaves out sglang, torchaudio and torchvision. Ways take turns; of each the fastest turn counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.token_objects import (
    CHATML,
    folder_store,
    imported,
    make_conversations,
    make_spec,
    make_tokenizer,
    put_commit,
)
from dflash_workers.contract.records import Json
from trainer.tokens.build import TEXT, Builder
from trainer.tokens.shards import Sample, read_shard

SPECFORGE, SPECULATORS = PEERS = ("specforge", "speculators")
PINS = ("specforge==0.2.0", "speculators==0.9.0", "hs-connectors==0.9.0")
# What the peers' preprocessing imports beside what is here already.
THEIR_NEEDS = ("httpx==0.28.1", "loguru==0.7.3", "openai==3.57.0", "pydantic-settings==2.16.3")
CHILD = Path(__file__).with_name("peer_preprocessing.py")
ANSWER_WORDS = 250  # 1,500 characters
ROWS = 200  # of an object
TURNS = 3

Rows = list[tuple[list[int], list[int]]]  # ids, mask


@dataclass
class Found:
    """What a way made of the conversations, and the CPU seconds of its fastest turn."""

    seconds: float = float("inf")
    rows: Any = None


def compare(num_conversations: int) -> list[Figure]:
    """Figures of the same conversations through all three."""
    conversations = make_conversations(num_conversations, ANSWER_WORDS)
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as name:
        folder = Path(name)
        make_tokenizer(folder / "model")
        shutil.copy(CHATML, folder / "chatml.jinja")
        (folder / "conversations.json").write_text(json.dumps(conversations), encoding="utf-8")
        builder, commits = _our_objects(folder, conversations)
        ours, theirs = Found(), {peer: Found() for peer in PEERS}
        with _peers(folder) as ask:
            for _ in range(TURNS):
                started = time.process_time()
                shards = [builder.shard_of(commit) for commit in commits]
                ours.seconds = min(ours.seconds, time.process_time() - started)
                ours.rows = [sample for shard in shards for sample in read_shard(shard)]
                for peer, found in theirs.items():
                    seconds, found.rows = ask(peer)
                    found.seconds = min(found.seconds, seconds)
    return _figures(num_conversations, ours, theirs)


def _figures(num: int, ours: Found, theirs: dict[str, Found]) -> list[Figure]:
    specforge, speculators = theirs[SPECFORGE], theirs[SPECULATORS]
    same = same_as_specforge(ours.rows, specforge.rows)
    same_too = same_as_speculators(ours.rows, speculators.rows)
    rate = "conversations/s"
    return [
        Figure("tokens.conversations_rate", num / ours.seconds, None, "higher", rate),
        Figure("tokens.specforge_rate", num / specforge.seconds, None, "higher", rate),
        Figure("tokens.speculators_rate", num / speculators.seconds, None, "higher", rate),
        Figure("tokens.vs_specforge", specforge.seconds / ours.seconds, 3, "higher", "ratio"),
        Figure("tokens.vs_speculators", speculators.seconds / ours.seconds, 1.5, "higher", "ratio"),
        Figure("tokens.same_as_specforge", same, 1, "higher", "share of the conversations"),
        Figure("tokens.same_as_speculators", same_too, 1, "higher", "share of the answers"),
    ]


def same_as_specforge(samples: Sequence[Sample], rows: Rows) -> float:
    """Share of the conversations whose ids and loss are the same, all of its answers together.

    SpecForge makes one row of a conversation: the loss of its answers added up.
    """
    answers: dict[str, list[Sample]] = {}
    for sample in samples:
        answers.setdefault(sample.prompt_key, []).append(sample)
    num_same: int = sum(
        all(ids[: len(s.ids)] == s.ids.tolist() for s in mine)
        and {at for at, carries in enumerate(mask) if carries}
        == {at for s in mine for at in range(s.prompt_len, len(s.ids))}
        for (ids, mask), mine in zip(rows, answers.values(), strict=True)
    )
    return num_same / len(rows)


def same_as_speculators(samples: Sequence[Sample], rows: Rows) -> float:
    """Share of the answers whose ids and loss are the same up to the stop id.

    speculators trains on the template's line end behind it, too.
    """
    num_same: int = sum(
        ids[: len(s.ids)] == s.ids.tolist()
        and mask[: len(s.ids)] == s.loss_mask().tolist()
        and len(ids) <= len(s.ids) + 1
        for (ids, mask), s in zip(rows, samples, strict=True)
    )
    return num_same / len(rows)


def _our_objects(folder: Path, conversations: Sequence[list[Json]]) -> tuple[Builder, list[Any]]:
    store = folder_store(folder / "s3")
    rows = [imported(f"{n:032x}", messages) for n, messages in enumerate(conversations)]
    commits = [
        put_commit(store, f"b{at}", TEXT, rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)
    ]
    model = folder / "model"
    return Builder(store, make_spec(model), str(model)), commits


@contextmanager
def _peers(folder: Path) -> Iterator[Callable[[str], tuple[float, Rows]]]:
    """A function that has a peer do the conversations once: CPU seconds and rows."""
    python = make_venv(folder / "venv")
    environ = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    command = [str(python), str(CHILD), str(folder)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, **pipes) as child:
        try:
            yield partial(_ask, child)
        finally:
            child.kill()


def _ask(child: subprocess.Popen[str], peer: str) -> tuple[float, Rows]:
    assert child.stdin and child.stdout
    child.stdin.write(f"{peer}\n")
    child.stdin.flush()
    for line in child.stdout:  # the peers print, too
        if line.startswith('{"seconds"'):
            said = json.loads(line)
            return said["seconds"], json.loads(Path(said["rows"]).read_bytes())
    raise RuntimeError(f"{peer} ended without an answer: see above")


def make_venv(folder: Path) -> Path:
    """The peers, with this environment's packages behind theirs; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    theirs = subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip()
    Path(theirs, "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", *PINS], check=True)
    subprocess.run([*install, *THEIR_NEEDS], check=True)
    return python
