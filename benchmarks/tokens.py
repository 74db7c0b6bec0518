"""How fast commits become token shards, on both roads, and what memory that takes.

    python -m benchmarks.tokens [--quick] [--samples 200000] [--conversations 2000]
                                [--out benchmarks/results]

A data object of 200 rows in a local folder is made into a shard, as build.py does it: read, checked
against its hash, decoded, tokenised or taken as it is, checked, written. Beside it, in turns, what
the same needs at least: on the ids road orjson, an Arrow array of int32 and zstd-1; on the text
road the tokenizer's `encode_batch` over the same texts. Times are CPU seconds of this process, so
that a machine shared with others gives the same ratios. Then the objects are made into shards, one
in ten by the text road, until `--samples` samples are done, with an eye on the process' memory. At
last `--conversations` go through the peers' preprocessing, too: see token_peers.py.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pyarrow as pa

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from benchmarks.token_objects import Bench
from benchmarks.token_peers import compare
from dflash_workers.contract.lines import decompress
from trainer.tokens.shards import read_provenance

FULL_SAMPLES, QUICK_SAMPLES = 200_000, 4_000
CONVERSATIONS = 2000
ROWS = 200  # of an object
REPEATS = 5
MB = 1_000_000
VERSIONS = ("orjson", "pyarrow", "zstandard", "numpy", "tokenizers", "transformers", "torch")

PROSE = """\
`ids_ratio` is `ids_rate` over `ids_limit`, `text_ratio` is `text_rate` over `text_limit`; the ways
alternate, and of each the fastest turn counts. Rates are per CPU second of one process, the
tokenizer's threads off. Texts are Python's own manual, the tokenizer a byte-level BPE of 8,192
ids trained on it. `growth_mb` is the process' memory at the end less that after a tenth.

The peers are SpecForge 0.2.0 (`preprocess_conversations`) and speculators 0.9.0
(`_preprocess_batch`, with the same tokenizer in the place of its vLLM server, without HTTP), from
PyPI, on the same conversations with answers of 250 words; ours is from object to shard, the peers'
from lists in memory to tensors in memory. All use this environment's torch, transformers and
tokenizers. The peers' preprocessing was installed without sglang, torchaudio and torchvision, which
it never imports. `same_as_*` compares ids and loss; speculators also trains on the template's line
end behind the stop id, which is left out of the comparison."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SAMPLES} samples, no peers")
    parser.add_argument("--samples", type=int, default=FULL_SAMPLES, help="of a full run")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="0: no peers")
    parser.add_argument("--out", type=Path, help="folder for the results of a full run")
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    figures = measure(QUICK_SAMPLES if options.quick else options.samples)
    if options.conversations and not options.quick:
        figures += compare(options.conversations)
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
        bench = Bench(Path(folder), ROWS)
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


def do_ids_by_hand(bench: Bench) -> None:
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


def do_text_by_hand(bench: Bench) -> None:
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


def measure_growth(bench: Bench, num_samples: int) -> float:
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
