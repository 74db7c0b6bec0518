"""Tiny tokenizers with real chat templates: Qwen3's, Qwen3.6's, ChatML.

Byte-level BPE as Qwen's: its pre-tokenizer, its control tokens, and a handful of merges made by
hand, so that ids never change. Line ends merge, which is where masks go wrong.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_workers.contract.chat import load_tokenizer, tokenizer_sha256
from dflash_workers.contract.records import (
    SCHEMA_VERSION,
    Json,
    RunSpec,
    Sampling,
    Target,
)

TEMPLATES = Path(__file__).parent / "templates"
CHATML = Path(__file__).parents[3] / "examples" / "chatml.jinja"
WORDS = ("\n\n", " the", " is", "assistant", "user", "system", " 4", "  ", ".\n", "\n\n\n")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def template(name: str) -> str:
    path = CHATML if name == "chatml" else TEMPLATES / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def make_tokenizer(folder: Path) -> Path:
    """A folder with the tokenizer's files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        ((spelled, _),) = spell.pre_tokenize_str(word)
        whole = spelled[0]
        for letter in spelled[1:]:
            if (whole, letter) not in merges:
                merges.append((whole, letter))
            whole += letter
            vocab.setdefault(whole, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKERS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


def make_spec(
    folder: Path, template_name: str, template_kwargs: Json | None = None, *, run: str = "run"
) -> RunSpec:
    """The run of a target with this tokenizer and template."""
    tokenizer = load_tokenizer(str(folder))
    stop_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    sha = tokenizer_sha256(str(folder))
    return RunSpec(
        schema=SCHEMA_VERSION,
        run=run,
        target=Target("tiny", "c", sha, "m", "w", len(tokenizer), 4096, "float32"),
        chat_template=template(template_name),
        template_kwargs=template_kwargs or {},
        sampling=Sampling(0.0, 1.0, -1, 64, list(stop_ids)),
        multi_turn="rollout",
        control_tokens="escape",
        thinking_end_id=int(tokenizer.convert_tokens_to_ids("</think>")),
    )
