"""How fast commits become token shards, on both roads, and what memory that takes.

    python -m benchmarks.tokens [--quick] [--samples 200000] [--out benchmarks/results]

A data object of 200 rows in a local folder is made into a shard, as build.py does it: read, checked
against its hash, decoded, tokenised or taken as it is, checked, written. Beside it, in turns, what
the same needs at least: on the ids road orjson, an Arrow array of int32 and zstd-1; on the text
road the tokenizer's `encode_batch` over the same texts. Times are CPU seconds of this process, so
that a machine shared with others gives the same ratios. Then the objects are made into shards, one
in ten by the text road, until `--samples` samples are done, with an eye on the process' memory.
Over 300 lines, because the bare ways to compare with are of use nowhere else.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pydoc_data.topics
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from dflash_workers.contract.chat import load_tokenizer, tokenizer_sha256
from dflash_workers.contract.commit import seal_rows
from dflash_workers.contract.errors import Missing
from dflash_workers.contract.lines import decompress
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Answer,
    Commit,
    Json,
    Row,
    RunSpec,
    Sampling,
    Target,
)
from dflash_workers.contract.store import Store
from trainer.tokens.build import IDS, TEXT, Builder
from trainer.tokens.shards import read_provenance

FULL_SAMPLES, QUICK_SAMPLES = 200_000, 4_000
ROWS = 200  # of an object
PROMPT_WORDS, ANSWER_WORDS = 120, 1100  # about 270 and 1,800 tokens of a large vocabulary
VOCAB_SIZE = 8192
REPEATS = 3
MB = 1_000_000
VERSIONS = ("orjson", "pyarrow", "zstandard", "numpy", "tokenizers", "transformers")
CHATML = Path(__file__).parents[1] / "examples" / "chatml.jinja"

PROSE = """\
`ids_ratio` is `ids_rate` over `ids_limit`, `text_ratio` is `text_rate` over `text_limit`; the ways
alternate, and of each the fastest turn counts. Rates are per CPU second of one process, the
tokenizer's threads off. Texts are Python's own manual, the tokenizer a byte-level BPE of 8,192
ids trained on it. `growth_mb` is the process' memory at the end less that after a tenth."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SAMPLES} samples")
    parser.add_argument("--samples", type=int, default=FULL_SAMPLES, help="of a full run")
    parser.add_argument("--out", type=Path, help="folder for the results of a full run")
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    figures = measure(QUICK_SAMPLES if options.quick else options.samples)
    print_figures(figures)
    if options.out and not options.quick:
        num_cores = len(os.sched_getaffinity(0))
        found = circumstances(describe_cpu(), VERSIONS)
        title = "Commits into token shards"
        write_figures(options.out, f"tokens_cpu{num_cores}", title, figures, found, PROSE)
    return 0


def measure(num_samples: int) -> list[Figure]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="dflash-bench-") as folder:
        bench = _Bench(Path(folder), ROWS)
        ids_s, ids_limit_s = fastest(
            lambda: bench.builder.shard_of(bench.ids), lambda: do_ids_by_hand(bench)
        )
        text_s, text_limit_s = fastest(
            lambda: bench.builder.shard_of(bench.text), lambda: do_text_by_hand(bench)
        )
        ids_tokens = read_provenance(bench.builder.shard_of(bench.ids))["num_tokens"]
        growth_mb = measure_growth(bench, num_samples)
    text_tokens = bench.num_encoded
    return [
        Figure("tokens.ids_rate", ids_tokens / ids_s, None, "higher", "tokens/s"),
        Figure("tokens.ids_limit", ids_tokens / ids_limit_s, None, "higher", "tokens/s"),
        Figure("tokens.ids_ratio", ids_limit_s / ids_s, 0.5, "higher", "ratio"),
        Figure("tokens.text_rate", text_tokens / text_s, None, "higher", "tokens/s"),
        Figure("tokens.text_limit", text_tokens / text_limit_s, None, "higher", "tokens/s"),
        Figure("tokens.text_ratio", text_limit_s / text_s, 0.85, "higher", "ratio"),
        Figure("tokens.growth_mb", growth_mb, 50, "lower", "MB"),
    ]


@dataclass(frozen=True)
class FolderStore(Store):
    """A folder in place of S3, so that only what is measured takes time."""

    def put_new(self, key: str, body: bytes) -> None:
        path = Path(self.prefix, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def get(self, key: str) -> bytes:
        try:
            return Path(self.prefix, key).read_bytes()
        except FileNotFoundError as error:
            raise Missing(key) from error


class _Bench:
    """An object for each road, and what they are tokenised with."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        model = make_tokenizer(folder / "model")
        self.tokenizer = load_tokenizer(str(model))
        no_client: Any = None
        self.store = FolderStore(no_client, "", str(folder / "s3"), "")
        spec = make_spec(model)
        self.builder = Builder(self.store, spec, str(model))
        conversations = make_conversations(num_rows)
        rows = [self._answered(n, c, spec) for n, c in enumerate(conversations)]
        self.ids = self._commit("ids", IDS, rows)
        self.text = self._commit("text", TEXT, [_imported(row) for row in rows])
        self.texts = [self._rendered(row.messages, spec) for row in rows]
        self.num_encoded = sum(len(encoding.ids) for encoding in self.encode())

    def encode(self) -> list[Any]:
        """All texts, by the tokenizer alone."""
        backend: Any = self.tokenizer
        found: list[Any] = backend.backend_tokenizer.encode_batch(
            self.texts, add_special_tokens=False
        )
        return found

    def _rendered(self, messages: list[Json], spec: RunSpec) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=spec.chat_template, tokenize=False
            )
        )

    def _answered(self, number: int, conversation: list[Json], spec: RunSpec) -> Row:
        answers: list[Answer] = []
        for at, message in enumerate(conversation):
            if message["role"] == "assistant":
                prompt = self.tokenizer.apply_chat_template(
                    conversation[:at],
                    chat_template=spec.chat_template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
                input_ids = self.tokenizer.encode(str(prompt), add_special_tokens=False)
                output_ids = self.tokenizer.encode(message["content"], add_special_tokens=False)
                output_ids.append(spec.sampling.stop_token_ids[0])
                answers.append(_answer(len(answers), input_ids, output_ids, message["content"]))
        key = f"{number:032x}"
        return Row(key, f"row-{number}", 0, False, "p:1", conversation, [], answers)

    def _commit(self, batch: str, road: str, rows: list[Row]) -> Commit:
        body, sha256 = seal_rows(rows)
        self.store.put_new(f"{batch}.jsonl.zst", body)
        return Commit(
            schema=SCHEMA_VERSION,
            run="bench",
            segment=0,
            batch=batch,
            attempt="a",
            data_key=f"{batch}.jsonl.zst",
            sha256=sha256,
            data_bytes=len(body),
            num_rows=len(rows),
            rejected=[],
            input_tokens=0,
            output_tokens=0,
            started_at=0.0,
            finished_at=0.0,
            worker="w",
            engine={},
            road=road,
        )


def do_ids_by_hand(bench: _Bench) -> None:
    """orjson, an Arrow array of int32, zstd-1: what the ids need at least."""
    lines = decompress(bench.store.get(bench.ids.data_key)).split(b"\n")
    ids = []
    for line in lines:
        if line:
            for answer in orjson.loads(line)["answers"]:
                ids.append(answer["input_ids"] + answer["output_ids"])
    table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))})
    options = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
    with pa.ipc.new_file(io.BytesIO(), table.schema, options=options) as file:
        file.write_table(table)


def do_text_by_hand(bench: _Bench) -> None:
    """The tokenizer alone."""
    bench.encode()


def fastest(*ways: Callable[[], object]) -> list[float]:
    """CPU seconds of each way; they take turns."""
    seconds = [float("inf")] * len(ways)
    for _ in range(REPEATS):
        for number, way in enumerate(ways):
            started = time.process_time()
            way()
            seconds[number] = min(seconds[number], time.process_time() - started)
    return seconds


def measure_growth(bench: _Bench, num_samples: int) -> float:
    """MB by which the process grew over all but the first tenth of the samples."""
    process = psutil.Process()
    num_done, started_at = 0, 0
    for commit in itertools.cycle([bench.text] + [bench.ids] * 9):
        if num_done >= num_samples:
            break
        if not started_at and num_done >= num_samples / 10:
            started_at = process.memory_info().rss
        num_done += read_provenance(bench.builder.shard_of(commit))["num_samples"]
    return max(process.memory_info().rss - started_at, 0) / MB


def make_conversations(num: int) -> list[list[Json]]:
    """Of the manual's words; one in twelve has three turns. The same at every call."""
    draw = random.Random(0)
    words = _manual().split(" ")
    found = []
    for _ in range(num):
        messages: list[Json] = []
        for _turn in range(3 if draw.random() < 1 / 12 else 1):
            for role, length in (("user", PROMPT_WORDS), ("assistant", ANSWER_WORDS)):
                num_words = draw.randint(length // 2, length * 3 // 2)
                begin = draw.randrange(len(words) - num_words)
                text = " ".join(words[begin : begin + num_words])
                messages.append({"role": role, "content": text.strip()})
        found.append(messages)
    return found


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of the manual, with ChatML's tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_manual().split("\n\n"), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.save_pretrained(folder)
    return folder


def make_spec(model: Path) -> RunSpec:
    sha256 = tokenizer_sha256(str(model))
    return RunSpec(
        schema=SCHEMA_VERSION,
        run="bench",
        target=Target("bench", "c", sha256, "m", "w", VOCAB_SIZE, 32768, "float32"),
        chat_template=CHATML.read_text(encoding="utf-8"),
        template_kwargs={},
        sampling=Sampling(0.0, 1.0, -1, 4096, [2]),
        multi_turn="rollout",
        control_tokens="escape",
    )


def _answer(turn: int, input_ids: list[int], output_ids: list[int], text: str) -> Answer:
    return Answer(
        turn=turn,
        input_ids=input_ids,
        output_ids=output_ids,
        segments=[len(output_ids)],
        content=text,
        reasoning_content="",
        tool_calls=[],
        finish_reason="stop",
        cached_tokens=0,
        latency_s=1.5,
        seed=turn,
    )


def _imported(row: Row) -> Row:
    return Row(row.key, row.id, 0, False, row.source, row.messages, [], [])


def _manual() -> str:
    return "\n\n".join(pydoc_data.topics.topics.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
