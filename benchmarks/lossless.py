r"""Does speculation ever change a reply: the target's own replies against drafted ones.

    python -m benchmarks.lossless --out benchmarks/results        200 prompts, minutes on two cores
    python -m benchmarks.lossless --quick                         a few, no files
    python -m benchmarks.lossless --model FOLDER --drafter EXPORT --out FOLDER

SmolLM2-135M (Llama-like) on the example prompts with other numbers in them, and a small Qwen3 of
random weights on random ids, both in fp32, at temperature 0 and at one where replies are samples.
Unless one is named, the drafter knows some of the replies by heart (by_heart.py), so that drafts
both hit and miss, many times. A reply that parts from the target's own where another choice was
less than TIE away is a tie, counted and shown; any other is a fault, and the program ends with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.by_heart import Known, learn_by_heart
from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from benchmarks.varied_prompts import varied_prompts
from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.staging import stage_smollm2
from trainer.drafter.choices import Sampling
from trainer.drafter.config import DrafterShape
from trainer.drafter.export import load_export
from trainer.drafter.fitting import drafter_config
from trainer.drafter.speculate import Limits, decode_plainly
from trainer.evaluate import TIE, parting_gap
from trainer.online.target import load_target, target_config
from trainer.timing import Decoded, decode_both_ways

TEMPERATURE = 0.8
SHAPE = DrafterShape(num_layers=1, block_size=4, mask_token_id=0, copy_target_layers=True)
NO_END: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Size:
    """How much is decoded."""

    num_prompts: int
    max_new_tokens: int
    num_steps: int  # of the drafter's training, at most
    prompts_at_once: int = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A target, its prompts, and where its replies end."""

    name: str
    model_dir: Path
    prompts: list[list[int]]
    stop_ids: frozenset[int]
    drafter_dir: Path | None = None  # None: one that learns some replies by heart
    known_share: int = 8  # one prompt in as many is known by heart
    num_steps: int = 60
    learning_rate: float = 2e-3


@dataclass(frozen=True, slots=True)
class Compared:
    """Both ways of decoding a case at one temperature."""

    name: str
    temperature: float
    found: Decoded
    num_drafts: int  # of a step

    @property
    def gaps(self) -> dict[int, float]:
        """By prompt, of the replies that part: to another choice at that place."""
        pairs = enumerate(zip(self.found.plain, self.found.drafted, strict=True))
        gaps = {number: parting_gap(plain, drafted.ids) for number, (plain, drafted) in pairs}
        return {number: gap for number, gap in gaps.items() if gap is not None}

    @property
    def num_faults(self) -> int:
        """Replies that part where nothing else was near."""
        return sum(gap > TIE for gap in self.gaps.values())


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    size = Size(4, 12, 10) if options.quick else Size(options.count, options.max_new_tokens, 500)
    with tempfile.TemporaryDirectory() as scratch:
        cases = _cases(options, size, Path(scratch))
        compared = [one for case in cases for one in compare(case, size)]
    figures = [figure for one in compared for figure in figures_of(one)]
    print_figures(figures)
    prose = _prose(compared, size)
    print(prose)
    if options.out:
        found = circumstances(describe_cpu(), ("torch", "transformers"))
        title = "Speculation and the replies"
        write_figures(options.out, "lossless_cpu2", title, figures, found, prose)
    return 1 if any(one.num_faults for one in compared) else 0


def compare(case: Case, size: Size) -> Iterator[Compared]:
    """At temperature 0 and at TEMPERATURE, with one drafter."""
    config = drafter_config(target_config(str(case.model_dir)), SHAPE, str(case.model_dir))
    drafter = load_export(case.drafter_dir) if case.drafter_dir else None
    layer_ids = (drafter.config if drafter else config).target_layer_ids
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(str(case.model_dir), layer_ids, dtype=torch.float32, device=device)
    limits = Limits(size.max_new_tokens, case.stop_ids)
    if drafter is None:
        prompts = case.prompts[:: case.known_share]
        replies = decode_plainly(target, prompts, limits)
        known = [Known(p, reply.ids) for p, reply in zip(prompts, replies, strict=True)]
        num_steps = min(case.num_steps, size.num_steps)
        drafter = learn_by_heart(
            target, config, known, num_steps=num_steps, learning_rate=case.learning_rate
        )
    drafter = drafter.to(device).eval()
    for temperature in (0.0, TEMPERATURE):
        found = decode_both_ways(
            target, drafter, case.prompts, limits, Sampling(temperature), size.prompts_at_once
        )
        yield Compared(case.name, temperature, found, drafter.config.num_drafts)


def figures_of(compared: Compared) -> list[Figure]:
    """Of one target at one temperature."""
    drafted = [reply for reply in compared.found.drafted if reply.tokens_by_step]
    lengths = [sum(r.tokens_by_step) / len(r.tokens_by_step) for r in drafted]
    equal = 1 - len(compared.gaps) / len(compared.found.plain)
    name = f"lossless.{compared.name}{'_sampled' if compared.temperature else ''}"
    figures = [
        Figure(f"{name}_equal_share", equal, 1.0, "higher", "ratio"),
        Figure(f"{name}_faults", compared.num_faults, 0, "lower", "replies"),
        Figure(f"{name}_accept_length", float(np.mean(lengths)), None, "higher", "tokens/step"),
    ]
    if compared.found.speed:
        speedup = compared.found.speed.speedup
        figures.append(Figure(f"{name}_speedup", speedup, None, "higher", "ratio"))
    return figures


def tiny_qwen3(folder: Path) -> Path:
    """A model of random weights, wild enough that its replies differ."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _cases(options: argparse.Namespace, size: Size, scratch: Path) -> list[Case]:
    random = np.random.default_rng(0)
    lengths = random.integers(3, 60, size.num_prompts)
    prompts = [random.integers(3, 500, length).tolist() for length in lengths]
    model_dir = tiny_qwen3(scratch / "qwen3")
    qwen3 = Case(
        "tiny_qwen3", model_dir, prompts, NO_END, known_share=2, num_steps=500, learning_rate=1e-2
    )
    if options.quick:
        return [qwen3]
    model_dir = options.model or stage_smollm2(scratch / "smollm2", dtype="float32")
    end = load_tokenizer(str(model_dir)).eos_token_id
    prompts = varied_prompts(str(model_dir), size.num_prompts, heldout=False)
    name = options.model.name if options.model else "smollm2"
    return [qwen3, Case(name, model_dir, prompts, frozenset([end]), options.drafter)]


def _prose(compared: list[Compared], size: Size) -> str:
    lines = [
        f"{size.num_prompts} prompts, up to {size.max_new_tokens} tokens each, "
        f"{size.prompts_at_once} at once.",
        "",
    ]
    for one in compared:
        hits = [hit for reply in one.found.drafted for hit in reply.hits_by_step]
        kept = sum(hit == one.num_drafts for hit in hits)
        lines.append(
            f"- {one.name} at {one.temperature}: {len(hits)} verify steps, {kept} kept every "
            f"draft, {hits.count(0)} none; {len(one.gaps)} replies part"
        )
        lines += [f"  - prompt {n}: another choice {gap:.1e} away" for n, gap in one.gaps.items()]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--model", type=Path, help="a target; else SmolLM2")
    parser.add_argument("--drafter", type=Path, help="an export for it")
    parser.add_argument("--out", type=Path, help="folder of the results")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
