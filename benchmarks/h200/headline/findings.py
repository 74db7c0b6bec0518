r"""Figures and curves of the headline run, out of the files that its stages left: its last stage.

    python -m benchmarks.h200.headline.findings pytorch --model M --drafter EXPORT \
        --asked asked.json --out pytorch.json
    python -m benchmarks.h200.headline.findings figures --model M --asked asked.json \
        --measured measured.json --variant three --out RESULTS
    python -m benchmarks.h200.headline.findings curves --drafters DRAFTERS --out RESULTS

`figures` compares the replies of both servers, token by token, and names every parting with the gap
between the target's two best logits there. `pytorch` is the product's own evaluation of an export
on the same prompts. `curves` draws what each variant was worth as it trained, and what more data
brought at equal steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import orjson
import torch

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.h200.headline.curves import Curve, draw_curves, draw_scaling, read_curve
from benchmarks.h200.headline.measure import (
    SAMPLED,
    Heldout,
    Measured,
    macro_accept_length,
    read_heldout,
    read_measured,
)
from benchmarks.h200.headline.training import TRAINING, VARIANTS
from benchmarks.machine import describe_cpu
from benchmarks.served import partings
from dflash_workers.contract.errors import NotEnough
from dflash_workers.contract.flags import is_repetitive
from trainer.cli.evaluation import beginning_of
from trainer.drafter.export import load_export, read_provenance
from trainer.drafter.speculate import Limits
from trainer.evaluate import Question, Terms, evaluate

GOALS = {"accept_length": 3.0, "speedup_1": 1.3, "speedup_48": 1.05}
EQUAL_GOAL = 0.99
DECODED_AT_ONCE = 32  # in PyTorch


def main(arguments: list[str]) -> int:
    """The command."""
    args = _parser().parse_args(arguments)
    args.run(args)
    return 0


def find_figures(args: argparse.Namespace) -> None:
    """Of one drafter in a server."""
    heldout, measured = read_heldout(args.asked), read_measured(args.measured)
    if not any(measured.drafted.num_steps):
        raise NotEnough("the server counted no verify step: was it started with a drafter?")
    figures = figures_of(heldout, measured)
    print_figures(figures)
    lines = partings(measured.plain, measured.drafted, args.model, heldout.asked())
    prose = f"Drafter {args.variant}, {len(heldout.prompts)} held-out prompts."
    if lines:
        prose += "\n\nReplies that part, with the gap between the two best logits there:\n\n"
        prose += "\n".join(lines)
    found = circumstances(_machine(), ("torch", "transformers", "numpy"))
    name = f"headline_{args.variant}"
    write_figures(args.out, name, "Served with a drafter of its own", figures, found, prose)


def figures_of(heldout: Heldout, measured: Measured) -> list[Figure]:
    """Acceptance by domain, what replies have in common, speed; and how many tokens a step would
    have to bring for the speed of a server without a drafter.
    """
    accept, by_domain = macro_accept_length(heldout.domains, measured.drafted)
    sampled, _ = macro_accept_length(heldout.domains, measured.sampled)
    pairs = list(zip(measured.plain.ids, measured.drafted.ids, strict=True))
    loops = statistics.fmean(is_repetitive(ids) for ids in measured.plain.ids)
    figures = [
        _figure("accept_length", accept, "tokens/step"),
        _figure(f"accept_length_at_{SAMPLED:g}", sampled, "tokens/step"),
        *(_figure(f"accept_length.{d}", mean, "tokens/step") for d, mean in by_domain.items()),
        Figure("headline.loop_share", loops, None, "lower", "ratio"),
        Figure(
            "headline.equal_share",
            statistics.fmean(a == b for a, b in pairs),
            EQUAL_GOAL,
            "higher",
            "ratio",
        ),
    ]
    for streams, speeds in measured.speeds.items():
        plain = speeds.num_tokens / statistics.median(speeds.plain_s)
        figures += [
            _figure(f"speedup_{streams}", speeds.speedup, "ratio"),
            _figure(f"plain_{streams}", plain, "tokens/s"),
            _figure(f"drafted_{streams}", plain * speeds.speedup, "tokens/s"),
            Figure(
                f"headline.break_even_{streams}",
                accept / speeds.speedup,
                None,
                "lower",
                "tokens/step",
            ),
        ]
    return figures


def measure_in_pytorch(args: argparse.Namespace) -> None:
    """Decode the first prompts both ways, in fp32."""
    heldout = read_heldout(args.asked)
    pairs = list(zip(heldout.prompts, heldout.domains, strict=True))[: args.count]
    found = evaluate(
        args.model,
        load_export(args.drafter),
        [Question(ids, domain) for ids, domain in pairs],
        Terms(
            Limits(args.max_new_tokens, frozenset(heldout.stop_ids)),
            prompts_at_once=DECODED_AT_ONCE,
        ),
        start=beginning_of(read_provenance(args.drafter), None),
    )
    args.out.write_bytes(orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2))
    acceptance = found.acceptance
    print(f"{acceptance.over_sources:.3f} tokens a step over domains, {found.num_faults} faults")


def draw(args: argparse.Namespace) -> None:
    """Every variant that has begun to train."""
    curves: dict[str, Curve] = {}
    for folder in sorted(args.drafters.iterdir()):
        metrics = folder / TRAINING / "metrics.jsonl"
        if metrics.exists() and (curve := read_curve(metrics)).steps:
            curves[folder.name] = curve
    args.out.mkdir(parents=True, exist_ok=True)
    draw_curves(curves, args.out / "headline_curves.png")
    by_size = {
        v.num_samples: curves[n] for n, v in VARIANTS.items() if v.num_samples and n in curves
    }
    if by_size:
        draw_scaling(by_size, args.out / "headline_data.png")
    facts = {name: asdict(curve) for name, curve in curves.items()}
    (args.out / "headline_curves.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))


def _figure(name: str, value: float, unit: str) -> Figure:
    return Figure(f"headline.{name}", value, GOALS.get(name), "higher", unit)


def _machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else describe_cpu()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stages = parser.add_subparsers(required=True)
    figures = stages.add_parser("figures")
    figures.set_defaults(run=find_figures)
    figures.add_argument("--measured", type=Path, required=True)
    figures.add_argument("--variant", required=True, help="name of the drafter")
    decoding = stages.add_parser("pytorch")
    decoding.set_defaults(run=measure_in_pytorch)
    decoding.add_argument("--drafter", type=Path, required=True)
    decoding.add_argument("--count", type=int, default=96)
    decoding.add_argument("--max-new-tokens", type=int, default=128)
    curves = stages.add_parser("curves")
    curves.set_defaults(run=draw)
    curves.add_argument("--drafters", type=Path, required=True)
    for stage in (figures, decoding):
        stage.add_argument("--model", required=True)
        stage.add_argument("--asked", type=Path, required=True)
    for stage in (figures, decoding, curves):
        stage.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
