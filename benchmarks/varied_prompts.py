"""As many prompts as are asked for, out of the example prompts: the same texts with other numbers.

Used by served.py, which needs some to train on and some that were never seen. Texts are dealt to
either side, so that no held-out prompt differs from a known one by its numbers only.
"""

from __future__ import annotations

import random
import re
from contextlib import suppress
from pathlib import Path

import orjson

from dflash_workers.contract.chat import load_tokenizer, open_chat, own_template

PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
HELDOUT_EVERY = 5  # one text in as many


def varied_prompts(model_dir: str, count: int, *, heldout: bool) -> list[list[int]]:
    """Ids of `count` different prompts; the same at each call, and the first ones of a larger."""
    texts = [t for i, t in enumerate(_texts()) if (i % HELDOUT_EVERY == 0) == heldout]
    numbers = random.Random(int(heldout))
    chat = open_chat(model_dir, own_template(load_tokenizer(model_dir)), {})
    said: dict[str, None] = {}
    while len(said) < count:
        text = texts[len(said) % len(texts)]
        other = re.sub(r"\d+", lambda found: _like(found[0], numbers), text)
        said.setdefault(other if other not in said else f"Question {len(said)}. {other}")
    return [chat.prompt_ids([{"role": "user", "content": text}], []) for text in said]


def _texts() -> list[str]:
    """Questions of one turn. Some example rows are broken on purpose."""
    texts = set()
    for line in PROMPTS.read_bytes().splitlines():
        with suppress(orjson.JSONDecodeError, KeyError, TypeError):
            messages = orjson.loads(line)["messages"]
            texts |= {m["content"] for m in messages if m["role"] == "user" and len(messages) == 1}
    return sorted(text for text in texts if text and isinstance(text, str))


def _like(number: str, numbers: random.Random) -> str:
    """A number of as many digits."""
    size = len(number)
    return str(numbers.randint(10 ** (size - 1) if size > 1 else 1, 10**size - 1))
