"""What SpecForge and speculators make of conversations. Runs in their venv, never in ours.

    python peer_preprocessing.py FOLDER

Started by token_peers.py, which knows what is in the folder: `model/`, `chatml.jinja` and
`conversations.json`. Each line of stdin names a peer; the line printed for it holds the CPU seconds
that its own preprocessing took and the file with the rows that it made, as [ids, mask] pairs.
speculators asks a vLLM server to render: here the same tokenizer answers in its place, at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 1 << 20  # nothing is cut off
Rows = list[tuple[list[int], list[int]]]
Conversations = list[list[dict[str, Any]]]


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    folder = Path(arguments[0])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "model", local_files_only=True)
    tokenizer.chat_template = (folder / "chatml.jinja").read_text(encoding="utf-8")
    tokenizer.pad_token = "<|endoftext|>"
    conversations = json.loads((folder / "conversations.json").read_text(encoding="utf-8"))
    peers: dict[str, Callable[[Any, Conversations], Any]] = {
        "specforge": specforge,
        "speculators": speculators,
    }
    for line in sys.stdin:
        name = line.strip()
        started = time.process_time()
        found = peers[name](tokenizer, conversations)
        seconds = time.process_time() - started
        path = folder / f"{name}.json"
        path.write_text(json.dumps(rows_of(found)), encoding="utf-8")
        print(json.dumps({"seconds": seconds, "rows": str(path)}), flush=True)


def specforge(tokenizer: Any, conversations: Conversations) -> Any:
    """Its parser of ChatML. The stop id ends a turn, as it does for us; a line end follows it."""
    preprocessing = import_module("specforge.data.preprocessing")
    template = import_module("specforge.data.template").ChatTemplate(
        assistant_header="<|im_start|>assistant\n",
        user_header="<|im_start|>user\n",
        end_of_turn_token="<|im_end|>",
    )
    no_tools: list[list[Any]] = [[] for _ in conversations]
    return preprocessing.preprocess_conversations(
        tokenizer, conversations, template, max_length=MAX_LENGTH, tools=no_tools
    )


def speculators(tokenizer: Any, conversations: Conversations) -> Any:
    """Its rows by render boundaries, one per answer."""
    preprocessing: Any = import_module("speculators.data_generation.preprocessing")

    def render(endpoint: str, messages: Any, **options: Any) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages,
            tools=options["tools"],
            add_generation_prompt=options["add_generation_prompt"],
            tokenize=False,
        )
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids[: options["truncate_prompt_tokens"]]

    preprocessing.render_conversation = render
    return preprocessing._preprocess_batch(
        {"conversations": conversations},
        is_multimodal=False,
        render_endpoint="in this process",
        max_length=MAX_LENGTH,
    )


def rows_of(found: Any) -> Rows:
    """Of tensors with or without a batch dimension."""
    pairs = zip(found["input_ids"], found["loss_mask"], strict=True)
    return [(ids.flatten().tolist(), mask.flatten().tolist()) for ids, mask in pairs]


if __name__ == "__main__":
    main(sys.argv[1:])
