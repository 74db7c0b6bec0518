"""Conversations and the objects that hold them, as the tokens' benchmarks read them.

Used by tokens.py and token_peers.py. Texts are Python's own manual, so that nothing is downloaded
and everybody has the same; the tokenizer is trained on it, the template is examples/chatml.jinja.
"""

from __future__ import annotations

import pydoc_data.topics
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_workers.contract.chat import load_tokenizer, tokenizer_sha256
from dflash_workers.contract.commit import seal_rows
from dflash_workers.contract.errors import Missing
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

PROMPT_WORDS, ANSWER_WORDS = 120, 1100  # about 270 and 1,800 tokens of a large vocabulary
VOCAB_SIZE = 8192
CHATML = Path(__file__).parents[1] / "examples" / "chatml.jinja"


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


class Bench:
    """An object for each road, and what they are tokenised with."""

    def __init__(self, folder: Path, num_rows: int) -> None:
        model = make_tokenizer(folder / "model")
        self.tokenizer = load_tokenizer(str(model))
        spec = make_spec(model)
        self.store = folder_store(folder / "s3")
        self.builder = Builder(self.store, spec, str(model))
        conversations = make_conversations(num_rows)
        rows = [self._answered(n, c, spec) for n, c in enumerate(conversations)]
        self.ids = put_commit(self.store, "ids", IDS, rows)
        self.text = put_commit(
            self.store, "text", TEXT, [imported(r.key, r.messages) for r in rows]
        )
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
        return Row(f"{number:032x}", f"row-{number}", 0, False, "p:1", conversation, [], answers)


def folder_store(folder: Path) -> FolderStore:
    """A store in a local folder."""
    no_client: Any = None
    return FolderStore(no_client, "", str(folder), "")


def put_commit(store: Store, batch: str, road: str, rows: list[Row]) -> Commit:
    """A data object of these rows, and what a commit says of it."""
    body, sha256 = seal_rows(rows)
    store.put_new(f"{batch}.jsonl.zst", body)
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


def imported(key: str, messages: list[Json]) -> Row:
    """A finished conversation, as `import` commits it."""
    return Row(key, f"row-{key}", 0, False, "p:1", messages, [], [])


def make_conversations(num: int, answer_words: int = ANSWER_WORDS) -> list[list[Json]]:
    """Of the manual's words; one in twelve has three turns. The same at every call."""
    draw = random.Random(0)
    words = _manual().split(" ")
    found = []
    for _ in range(num):
        messages: list[Json] = []
        for _turn in range(3 if draw.random() < 1 / 12 else 1):
            for role, length in (("user", PROMPT_WORDS), ("assistant", answer_words)):
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


def _manual() -> str:
    return "\n\n".join(pydoc_data.topics.topics.values())
