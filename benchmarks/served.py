r"""Is an export in a real server the drafter that was trained: same replies, same acceptance.

    python -m benchmarks.served prompts --model M --out asked.json
    python -m benchmarks.served ask --url PLAIN --prompts asked.json --out plain.json
    python -m benchmarks.served ask --url DRAFTED --prompts asked.json --out drafted.json
    python -m benchmarks.served evaluate --model M --drafter D --prompts asked.json --out ours.json
    python -m benchmarks.served compare --model M --prompts asked.json \
        plain.json drafted.json ours.json --out FOLDER

Held-out prompts (of a run: --run; else other numbers in the example prompts' texts) are asked of a
server without a drafter, of one with it, and decoded in PyTorch; all at temperature 0, by the
servers one at a time. Replies that part are shown with the gap between the target's two best logits
there: a server in bf16 may take the other one of two that are equal to its rounding. Tokens per
verify step are the server's own count, the first token of a reply, which comes with the prompt,
left out on both sides. short_training.py makes a drafter; h200/served.sh has all stages in order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import orjson
import torch

from benchmarks.asking import ask
from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from benchmarks.varied_prompts import varied_prompts
from dflash_workers.contract.chat import load_tokenizer
from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.settings import load_settings
from dflash_workers.contract.store import open_store
from trainer.drafter.export import load_export
from trainer.drafter.speculate import Limits, decode_speculatively
from trainer.online.samples import read_samples
from trainer.online.target import load_target

EQUAL_GOAL = 0.99
ACCEPT_GOAL = 0.05  # of the accept length measured in PyTorch
DECODED_AT_ONCE = 16  # in PyTorch


@dataclass(frozen=True, slots=True)
class Replies:
    """To each prompt, from one decoder."""

    ids: list[list[int]]
    num_steps: list[int]  # verify steps; 0: nothing was drafted
    seconds: float

    @property
    def accept_length(self) -> float:
        """Tokens per verify step, mean over the prompts that had any."""
        pairs = zip(self.ids, self.num_steps, strict=True)
        return statistics.fmean((len(ids) - 1) / steps for ids, steps in pairs if steps)

    @property
    def tokens_per_s(self) -> float:
        """Of all replies, one after another."""
        return sum(map(len, self.ids)) / self.seconds


@dataclass(frozen=True, slots=True)
class Asked:
    """What all decoders are given."""

    prompts: list[list[int]]
    stop_ids: list[int]
    max_new_tokens: int


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.stage == "prompts":
        make = (
            partial(take_prompts, options.run)
            if options.run
            else partial(make_prompts, options.model)
        )
        _write(options.out, make(options.count, options.max_new_tokens))
    elif options.stage == "ask":
        _write(options.out, ask_server(options.url, _read_asked(options.prompts)))
    elif options.stage == "evaluate":
        asked = _read_asked(options.prompts)
        _write(options.out, decode(options.model, options.drafter, asked))
    else:
        replies = [Replies(**orjson.loads(path.read_bytes())) for path in options.replies]
        _compare(replies, options)
    return 0


def make_prompts(model_dir: str, count: int, max_new_tokens: int) -> Asked:
    """Prompts that no training of `train` has seen."""
    end = load_tokenizer(model_dir).eos_token_id
    return Asked(varied_prompts(model_dir, count, heldout=True), [end], max_new_tokens)


def take_prompts(run: str, count: int, max_new_tokens: int) -> Asked:
    """The first turns of a run's held-out samples, each prompt once."""
    settings = load_settings({"run": run})
    samples = read_samples(open_store(settings), settings.require_run(), heldout=True)
    prompts = dict.fromkeys(tuple(s.ids[: s.prompt_len].tolist()) for s in samples if s.turn == 0)
    stop_ids = {int(s.ids[-1]) for s in samples if s.finish_reason == "stop"}
    return Asked([list(p) for p in prompts][:count], sorted(stop_ids), max_new_tokens)


def ask_server(url: str, asked: Asked) -> Replies:
    """Through /generate, one at a time."""
    ids, num_steps = [], []
    sampling = {
        "temperature": 0,
        "max_new_tokens": asked.max_new_tokens,
        "stop_token_ids": asked.stop_ids,
    }
    ask(url, asked.prompts[0], sampling)  # whatever is compiled or captured late
    began = time.monotonic()
    for prompt in asked.prompts:
        reply = ask(url, prompt, sampling)
        ids.append(reply["output_ids"])
        num_steps.append(reply["meta_info"].get("spec_verify_ct", 0))
    return Replies(ids, num_steps, time.monotonic() - began)


def decode(model_dir: str, drafter_dir: Path, asked: Asked) -> Replies:
    """By drafting and verifying in PyTorch, in fp32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = load_export(drafter_dir).to(device).eval()
    target = load_target(
        model_dir, drafter.config.target_layer_ids, dtype=torch.float32, device=device
    )
    limits = Limits(asked.max_new_tokens, frozenset(asked.stop_ids))
    began = time.monotonic()
    replies = [
        reply
        for start in range(0, len(asked.prompts), DECODED_AT_ONCE)
        for reply in decode_speculatively(
            target, drafter, asked.prompts[start : start + DECODED_AT_ONCE], limits
        )
    ]
    seconds = time.monotonic() - began
    return Replies([r.ids for r in replies], [len(r.tokens_by_step) for r in replies], seconds)


def figures_of(plain: Replies, drafted: Replies, ours: Replies) -> list[Figure]:
    """Of the same prompts' replies without a drafter, with it, and in PyTorch."""
    equal = [a == b for a, b in zip(plain.ids, drafted.ids, strict=True)]
    served, measured = drafted.accept_length, ours.accept_length
    apart = abs(served - measured) / measured
    speedup = drafted.tokens_per_s / plain.tokens_per_s
    return [
        Figure("served.equal_share", sum(equal) / len(equal), EQUAL_GOAL, "higher", "ratio"),
        Figure("served.accept_length", served, None, "higher", "tokens/step"),
        Figure("served.accept_length_pytorch", measured, None, "higher", "tokens/step"),
        Figure("served.accept_difference", apart, ACCEPT_GOAL, "lower", "ratio"),
        Figure("served.speedup_1", speedup, None, "higher", "ratio"),
    ]


def partings(plain: Replies, drafted: Replies, model_dir: str, asked: Asked) -> list[str]:
    """A line for each reply that the drafter changed: where, and how near the choice was."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(model_dir, [], dtype=torch.float32, device=device)
    lines = []
    for number, (a, b) in enumerate(zip(plain.ids, drafted.ids, strict=True)):
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)
            ids = torch.tensor([asked.prompts[number] + a[:place]], device=device)
            best = target.model(ids).logits[0, -1].topk(2).values
            lines.append(f"- prompt {number}, token {place}: {float(best[0] - best[1]):.4f}")
    return lines


def _compare(replies: list[Replies], options: argparse.Namespace) -> None:
    plain, drafted, ours = replies
    if not any(drafted.num_steps):
        raise NotEnough("the server counted no verify step: was it started with a drafter?")
    figures = figures_of(plain, drafted, ours)
    print_figures(figures)
    asked = _read_asked(options.prompts)
    lines = partings(plain, drafted, options.model, asked)
    prose = [f"{len(plain.ids)} held-out prompts, up to {asked.max_new_tokens} tokens each."]
    if lines:
        prose += ["", "Replies that part, with the gap between the two best logits there:", *lines]
    print("\n".join(prose))
    if options.out:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else describe_cpu()
        found = circumstances(machine, ("torch", "transformers", "numpy"))
        name = f"served_{machine.split()[-1].lower()}"
        write_figures(options.out, name, "An export, served", figures, found, "\n".join(prose))


def _read_asked(path: Path) -> Asked:
    return Asked(**orjson.loads(path.read_bytes()))


def _write(path: Path, value: Asked | Replies) -> None:
    path.write_bytes(orjson.dumps(asdict(value)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    prompts = stages.add_parser("prompts", help="take held-out prompts from a run")
    prompts.add_argument("--run", default="", help="its held-out prompts; else --model's examples")
    prompts.add_argument("--model", default="")
    prompts.add_argument("--count", type=int, default=100)
    prompts.add_argument("--max-new-tokens", type=int, default=128)
    ask = stages.add_parser("ask", help="ask a server")
    ask.add_argument("--url", required=True)
    evaluate = stages.add_parser("evaluate", help="decode in PyTorch")
    evaluate.add_argument("--drafter", type=Path, required=True)
    compare = stages.add_parser("compare", help="three files of replies: plain, drafted, ours")
    compare.add_argument("replies", type=Path, nargs=3)
    for stage in (evaluate, compare):
        stage.add_argument("--model", required=True)
    for stage in (ask, evaluate, compare):
        stage.add_argument("--prompts", type=Path, required=True)
    for stage in (prompts, ask, evaluate):
        stage.add_argument("--out", type=Path, required=True)
    compare.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
