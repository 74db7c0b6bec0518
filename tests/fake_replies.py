"""What the fake engine says: bodies of replies, made of what the prompt's last user message wants.

See fake_engine.py for the words. Nothing here knows HTTP.
"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass
from typing import Any

STOP = "<|im_end|>"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None}
Body = dict[str, Any]


@dataclass(frozen=True)
class Replies:
    """One tokenizer's."""

    tokenizer: Any

    def body(self, question: Body, message: str, reason: str) -> Body:
        """A whole reply of /generate."""
        asked, limit = question["input_ids"], question["sampling_params"]["max_new_tokens"]
        num_letters = int(number_in(message, "count"))
        ids = self._counted(asked, num_letters) if num_letters else self._said(asked, message)
        if reason == "length":
            ids = (ids * limit)[:limit]
        else:
            stop_id = self.tokenizer.convert_tokens_to_ids(STOP)
            ids = [*ids, stop_id] if reason == "stop" else ids
            ids = ids if num_letters else _rest(ids, asked)
            stop_ids = question["sampling_params"].get("stop_token_ids", [stop_id])
            ids = ids[: min([*(at + 1 for at, i in enumerate(ids) if i in stop_ids), limit])]
            if reason == "stop" and ids[-1] not in stop_ids:
                reason = "length"
        is_stopped = reason == "stop"
        finish: Body = {"type": reason} | ({"matched": ids[-1]} if is_stopped else {})
        text = self.text(ids[:-1] if is_stopped else ids)
        if "stopstring" in message:
            finish, text = {"type": "stop", "matched": "."}, text[: len(text) // 2]
        ids = ids[:-1] if is_stopped and "nostop" in message else ids
        ids = question["input_ids"] + ids if "echo" in message else ids
        ids = [*ids[:-1], 1 << 20] if "outside" in message else ids
        return {
            "text": "Other words." if "othertext" in message else text,
            "output_ids": ids,
            "meta_info": {
                "id": question["rid"],
                "finish_reason": ABORTED if reason == "abort" else finish,
                "prompt_tokens": len(question["input_ids"]),
                "completion_tokens": len(ids) + ("mismatch" in message),
                "cached_tokens": 0,
            },
        }

    def _counted(self, input_ids: list[int], num_ids: int) -> list[int]:
        """Letters by the prompt and their place: what is left of them after the answer so far."""
        header = list(self.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
        ends = range(len(header), len(input_ids) + 1)
        prompt_len = max(end for end in ends if input_ids[end - len(header) : end] == header)
        letters = self.tokenizer.convert_tokens_to_ids(list(string.ascii_letters))
        whole = random.Random(str(input_ids[:prompt_len])).choices(letters, k=num_ids)
        return whole[len(input_ids) - prompt_len :]

    def _said(self, input_ids: list[int], message: str) -> list[int]:
        said = message.partition("say:")[2] or f"Answer to {message}"
        can_think = "</think>" not in self.tokenizer.decode(input_ids[-4:])
        if "musealways" in message or ("muse" in message and can_think):
            said = f"<think>Well.</think>{said}"
        return list(self.tokenizer.encode(said, add_special_tokens=False))

    def as_chat(self, body: Body, input_ids: list[int] | None) -> Body:
        """The same as a reply of /v1/chat/completions; with ids where the prompt's are given."""
        meta = body["meta_info"]
        choice: Body = {
            "index": 0,
            "message": {"role": "assistant", "content": body["text"]},
            "finish_reason": meta["finish_reason"]["type"],
        }
        if input_ids is not None:
            choice |= {"prompt_token_ids": input_ids, "token_ids": body["output_ids"]}
        usage = {name: meta[name] for name in ("prompt_tokens", "completion_tokens")}
        return {"id": meta["id"], "choices": [choice], "usage": usage}

    def log_probs(self, input_ids: list[int], noise: float) -> list[list[float | int | None]]:
        """A number of its own for each id at each place; the first has none."""
        found: list[list[float | int | None]] = [[None, input_ids[0], None]]
        for at, token_id in enumerate(input_ids[1:], start=1):
            found.append([-((at * 7919 + token_id * 104729) % 1000) / 100 + noise, token_id, None])
        return found

    def text(self, ids: list[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def last_message(self, input_ids: list[int]) -> str:
        """What the user said last."""
        text = self.tokenizer.decode(input_ids, skip_special_tokens=False)
        message = text.rpartition("<|im_start|>user\n")[2].partition(STOP)[0]
        return str(message).removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")


def number_in(message: str, name: str) -> float:
    """The 0.5 of `wait=0.5`; 0 where there is none."""
    found = re.search(rf"{name}=([\d.]+)", message)
    return float(found[1]) if found else 0.0


def _rest(answer: list[int], input_ids: list[int]) -> list[int]:
    """The answer without the part that the prompt ends with already."""
    for num_ids in range(min(len(answer) - 1, len(input_ids)), 1, -1):
        if input_ids[-num_ids:] == answer[:num_ids]:
            return answer[num_ids:]
    return answer
