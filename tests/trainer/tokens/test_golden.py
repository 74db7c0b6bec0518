"""Shards of fixed conversations, id by id: another value means that old shards read as wrong.

`python -m tests.trainer.tokens.test_golden` prints the file anew, for a person to compare.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest

from dflash_workers.contract.records import Json, Row, RunSpec
from tests.trainer.tokens.targets import make_spec, make_tokenizer
from trainer.tokens.shards import Sample, Source, read_provenance, read_shard, write_shard
from trainer.tokens.text_road import open_text_road

GOLDEN = Path(__file__).parent / "golden.json"
TARGETS = ("chatml", "qwen3", "qwen3_6")

TOOL: Json = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CALL: Json = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CONVERSATIONS: list[tuple[list[Json], list[Json]]] = [
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "Two\n\nand two."},
            {"role": "user", "content": "And é?"},
            {"role": "assistant", "content": "\n\nA letter 🙂."},
        ],
        [],
    ),
    (
        [
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "name": "add"},
            {"role": "assistant", "content": "It is 5."},
        ],
        [TOOL],
    ),
]


def shard_of(folder: Path, target: str) -> bytes:
    spec = make_spec(folder, target)
    rows = [
        Row(f"{n:032x}", f"golden-{n}", 0, False, "p:1", messages, tools, [])
        for n, (messages, tools) in enumerate(CONVERSATIONS)
    ]
    made = open_text_road(spec, str(folder)).samples_of(rows)
    assert made.quarantined == []
    return write_shard(made.samples, source_of(spec))


def source_of(spec: RunSpec) -> Source:
    return Source(
        road="text",
        run="golden",
        commit_key="c",
        data_sha256="",
        target_fingerprint="",
        tokenizer_sha256=spec.target.tokenizer_sha256,
        template_sha256="",
        vocab_size=spec.target.vocab_size,
        stop_token_ids=spec.sampling.stop_token_ids,
        tool_version="",
        skipped={},
    )


def facts(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "turn": sample.turn,
        "prompt_len": sample.prompt_len,
        "thinking_end": sample.thinking_end,
        "ids": sample.ids.tolist(),
    }


def content(body: bytes) -> dict[str, Any]:
    return {
        "content_sha256": read_provenance(body)["content_sha256"],
        "samples": [facts(sample) for sample in read_shard(body)],
    }


@pytest.mark.parametrize("target", TARGETS)
def test_a_shard_is_to_the_id_what_it_was(target: str, tmp_path: Path) -> None:
    golden = orjson.loads(GOLDEN.read_bytes())

    assert content(shard_of(make_tokenizer(tmp_path), target)) == golden[target]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tokenizer(Path(folder))
        found = {target: content(shard_of(tiny, target)) for target in TARGETS}
    sys.stdout.buffer.write(orjson.dumps(found) + b"\n")
