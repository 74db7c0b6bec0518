"""Online training from end to end on one GPU: tokens/s, utilisation, and where the time goes.

    python -m benchmarks.online --out benchmarks/results [--budget-s 180]
    python -m benchmarks.online --quick

Target and drafter in one process, with Qwen3-8B's shapes and random weights made on the device; the
trainer's own walk, packing, prefetch, target taps and step, fed with random samples of lognormal
length, packed into rows. What is left out: reading shards, checkpoints. Needs torch, numpy and
transformers alone, and no file. Stages print their figures as they end, so that a run that is cut
off has said something: first the target as transformers runs it, then, in what is left of the
budget, with its layers compiled.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.drafter_step import QWEN3_8B
from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.random_samples import RandomWalk
from trainer.drafter.config import FULL, DrafterConfig
from trainer.drafter.loss import LossRecipe
from trainer.drafter.model import Drafter
from trainer.drafter.objective import TargetEnds
from trainer.drafter.start import RANDOM_STD
from trainer.online.batches import DataRecipe, Place
from trainer.online.colocated import Colocated, Eyes, Pantry
from trainer.online.features import Features
from trainer.online.prefetch import Prefetch
from trainer.online.step import OptimizerRecipe, StepMetrics, Stepper
from trainer.online.stopwatch import DATA, PHASES, TARGET, Stopwatch
from trainer.online.target import FrozenTarget, tapped
from trainer.online.work import microbatch_flops, peak_of, target_size

NUM_WARM_UPS = 2  # steps; the first one compiles
STAGE_S = 60.0  # what the second stage may need: the target's layers compile in about half of it
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and where."""

    config: DrafterConfig
    data: DataRecipe
    num_microbatches: int  # of a step
    num_steps: int  # measured
    num_samples: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one stage."""

    step_s: float  # mean
    num_tokens: float  # of a step, without padding
    flops: float  # of a step
    seconds: dict[str, float]  # of a step, by phase
    peak_gib: float
    first_step_s: float
    fill: float  # tokens over places in rows


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes, any machine")
    parser.add_argument("--out", type=Path, help="folder for the results of a full run")
    parser.add_argument(
        "--budget-s", type=float, default=180.0, help="no stage starts that won't fit"
    )
    options = parser.parse_args(arguments)
    if not options.quick and not torch.cuda.is_available():
        print("a full run needs a CUDA GPU: try --quick", file=sys.stderr)
        return 1
    if options.quick:
        torch.set_num_threads(1)  # threads that spin would wait for each other on shared cores
    case = quick_case() if options.quick else full_case()
    figures: list[Figure] = []
    for name, is_compiled in (("", False), ("compiled_", True)):
        left_s = options.budget_s - (time.monotonic() - began)
        if name and (left_s < STAGE_S or options.quick):
            break
        measured = measure(case, is_compiled=is_compiled)
        found = figures_of(case, measured, name)
        print_figures(found)
        print(f"{name or 'plain_'}stage: {asdict(measured)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        figures += found
        if options.out and not options.quick:
            write(options.out, figures, case)
    return 0


def full_case() -> Case:
    """Qwen3-8B's shapes, as the recipe of its name trains."""
    data = DataRecipe(batch_size=1, num_anchors=512, max_len=3072, packed=True)
    return Case(QWEN3_8B, data, 4, 20, 2000, torch.device("cuda"), torch.bfloat16)


def quick_case() -> Case:
    """A rehearsal: that all of it runs, on a CPU in fp32."""
    config = replace(
        QWEN3_8B,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_layers=2,
        vocab_size=1000,
        max_position_embeddings=1024,
        layer_types=[FULL] * 2,
        num_target_layers=6,
        target_layer_ids=[1, 3],
        mask_token_id=999,
        block_size=4,
    )
    data = DataRecipe(batch_size=2, num_anchors=16, max_len=256, packed=True)
    return Case(config, data, 2, 3, 200, torch.device("cpu"), torch.float32)


def measure(case: Case, *, is_compiled: bool) -> Measured:
    """Build all of it, warm up, and time steps one after the other, as training does."""
    watch = Stopwatch(case.device)
    target = build_target(case, is_compiled=is_compiled)
    stepper = build_stepper(case, target, watch)
    config, size = case.config, target_size(target)
    is_cuda = case.device.type == "cuda"
    walk = RandomWalk(case.data, case.num_samples, case.config.vocab_size)
    with Prefetch(walk, Place(), mine=lambda number: True, device=case.device) as batches:
        pantry = Pantry(batches, Place(), case.device, watch, lambda: False)
        eyes = Eyes(Features(target, 0), needs_teacher=False)
        feeder = Colocated(pantry, eyes, lambda b: microbatch_flops(config, size, b), watch)

        def step(number: int) -> StepMetrics:
            first = number * case.num_microbatches
            fed = feeder.feed(range(first, first + case.num_microbatches))
            return stepper.step(fed, at=number, num_steps=1000)

        began = time.perf_counter()
        step(0)
        watch.read()
        first_step_s = time.perf_counter() - began
        print(f"first step: {first_step_s:.1f} s", file=sys.stderr, flush=True)
        for number in range(1, NUM_WARM_UPS):
            step(number)
        watch.read()
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        metrics = [step(NUM_WARM_UPS + n) for n in range(case.num_steps)]
        seconds = watch.read()
        step_s = (time.perf_counter() - began) / case.num_steps
    num_tokens = sum(m.num_tokens for m in metrics) / case.num_steps
    places = case.data.batch_size * case.data.max_len * case.num_microbatches
    return Measured(
        step_s,
        num_tokens,
        sum(m.work for m in metrics) / case.num_steps,
        {phase: seconds[phase] / case.num_steps for phase in PHASES},
        torch.cuda.max_memory_allocated() / GIB if is_cuda else 0.0,
        first_step_s,
        num_tokens / places,
    )


def build_target(case: Case, *, is_compiled: bool) -> FrozenTarget:
    """Of random weights; the layers that nobody listens to are not even made."""
    config = case.config
    text = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.target_layer_ids[-1] + 1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=False,
    )
    former = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with torch.device(case.device):
            model = Qwen3ForCausalLM(text)
    finally:
        torch.set_default_dtype(former)
    return tapped(model, config.target_layer_ids, is_compiled=is_compiled)


def build_stepper(case: Case, target: FrozenTarget, watch: Stopwatch) -> Stepper:
    return Stepper(
        random_drafter(case.config, case.device),
        TargetEnds(target.embed, target.head_VD),
        loss=LossRecipe(gamma=7.0),
        optimizer=OptimizerRecipe(learning_rate=6e-4),
        stopwatch=watch,
    )


def random_drafter(config: DrafterConfig, device: torch.device) -> Drafter:
    """Made on the device, in no time."""
    with torch.device(device):
        drafter = Drafter(config)
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=RANDOM_STD)
    return drafter


def figures_of(case: Case, measured: Measured, name: str) -> list[Figure]:
    rate = measured.num_tokens / measured.step_s
    figures = [
        Figure(f"online.{name}tokens_rate", rate, None, "higher", "tokens/s"),
        Figure(f"online.{name}step_ms", measured.step_s * 1000, None, "lower", "ms"),
        Figure(f"online.{name}row_fill", measured.fill, 0.97, "higher", "ratio"),
        Figure(f"online.{name}first_step", measured.first_step_s, None, "lower", "s"),
        Figure(f"online.{name}peak_memory", measured.peak_gib, None, "lower", "GiB"),
    ]
    for phase in PHASES:
        share = measured.seconds[phase] / measured.step_s
        goal = 0.02 if phase == DATA else None
        figures.append(Figure(f"online.{name}{phase}_share", share, goal, "lower", "ratio"))
    if peak := peak_of(case.device):
        mfu = measured.flops / measured.step_s / peak
        figures.append(Figure(f"online.{name}mfu", mfu, None, "higher", "ratio"))
    return figures


def write(out: Path, figures: list[Figure], case: Case) -> None:
    found = circumstances(
        torch.cuda.get_device_name(), ("torch", "triton", "transformers", "numpy")
    )
    prose = (
        "Target and drafter in one process, Qwen3-8B's shapes, random weights: rows of "
        f"{case.data.max_len} tokens packed from samples of lognormal length, "
        f"{case.data.num_anchors} anchors a row, {case.num_microbatches} rows a step, "
        f"{case.num_steps} steps after {NUM_WARM_UPS}. Of the target the layers up to the last one "
        f"listened to run, {case.config.target_layer_ids[-1] + 1} of them. "
        "MFU counts target and drafter without padding and without anything "
        f"computed twice. Shares are of the whole step; `{TARGET}` is the target's forward. "
        "`compiled_`: with the target's layers compiled."
    )
    name = f"online_{found.machine.split()[-1].lower()}"
    write_figures(out, name, "Online training, one GPU", figures, found, prose)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
