"""How fast the drafter's training step is: forward, loss and backward, without the optimizer.

    python -m benchmarks.drafter_step [--quick] [--out benchmarks/results]

Shapes of Qwen3-8B: five draft layers, blocks of 16, 512 anchors in a packed row of 3,072 tokens,
bf16, random weights and features; anchors are drawn anew in each step, so a step that recompiles
shows. Needs a CUDA GPU; `--quick` runs tiny shapes anywhere and says nothing about speed. Imports
trainer.drafter alone, so that torch, numpy and transformers are all it needs. A peer is measured by
a program of its own, on the same machine and in the same call; its numbers are handed in by flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.figures import Figure, circumstances, print_figures, write_figures
from benchmarks.gpu_time import kernel_times, times_ms
from trainer.drafter.anchors import Document, draw_packed_anchors
from trainer.drafter.blocks import BlockBatch
from trainer.drafter.config import FULL, DrafterConfig
from trainer.drafter.flops import StepFlops, StepSize, step_flops, utilisation
from trainer.drafter.leaks import ProbeShape, check_leaks
from trainer.drafter.loss import LossRecipe
from trainer.drafter.mask import BlockLayout, num_seen_pairs, sparse_mask
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.drafter.start import RANDOM_STD

QWEN3_8B = DrafterConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_layers=5,
    vocab_size=151_936,
    rms_norm_eps=1e-6,
    attention_bias=False,
    max_position_embeddings=40_960,
    rope_theta=1e6,
    rope_scaling=None,
    layer_types=[FULL] * 5,
    sliding_window=None,
    num_target_layers=36,
    target_layer_ids=[1, 9, 17, 25, 33],
    mask_token_id=151_669,
    block_size=16,
)
NUM_WARM_UPS = 3
NUM_TIMED = 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured, and where."""

    config: DrafterConfig
    row_len: int  # tokens
    num_anchors: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one case on a GPU."""

    first_step_s: float  # compilation included
    step_ms: list[float]
    mask_ms: float  # of each step, median
    peak_gib: float
    flops: StepFlops
    kernels_ms: dict[str, float]  # GPU time of one step, by kind of kernel, then the longest


@dataclass(frozen=True, slots=True)
class Peer:
    """The best of another trainer's step, measured beside ours."""

    step_ms: float
    peak_gib: float


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny shapes, any machine")
    parser.add_argument("--out", type=Path, help="folder for the results of a full run")
    parser.add_argument("--peer-step-ms", type=float, help="a peer's fastest step in this call")
    parser.add_argument("--peer-peak-gib", type=float, help="a peer's lowest peak in this call")
    parser.add_argument("--markov-rank", type=int, default=0, help="of a DSpark head; 0: plain")
    options = parser.parse_args(arguments)
    if options.quick:
        step_ms = quick_step_ms(options.markov_rank)
        print_figures([Figure("drafter.quick_step_ms", step_ms, None, "lower", "ms")])
        return 0
    if not torch.cuda.is_available():
        print("a full run needs a CUDA GPU: try --quick", file=sys.stderr)
        return 1
    config = dataclasses.replace(QWEN3_8B, markov_rank=options.markov_rank)
    case = Case(config, 3072, 512, torch.device("cuda"), torch.bfloat16)
    measured = measure(case)
    peer = Peer(options.peer_step_ms, options.peer_peak_gib) if options.peer_step_ms else None
    figures = figures_of(case, measured, peer)
    print_figures(figures)
    if options.out:
        found = circumstances(
            torch.cuda.get_device_name(), ("torch", "triton", "transformers", "numpy")
        )
        head = "dspark_" if config.markov_rank else ""
        name = f"drafter_step_{head}{found.machine.split()[-1].lower()}"
        title, prose = "The drafter's training step", details_of(case, measured)
        write_figures(options.out, name, title, figures, found, prose)
    return 0


def quick_step_ms(markov_rank: int) -> float:
    """A rehearsal: that all of it runs, on a CPU in fp32."""
    config = dataclasses.replace(
        QWEN3_8B,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_layers=2,
        layer_types=[FULL] * 2,
        target_layer_ids=[1, 33],
        vocab_size=1_000,
        mask_token_id=999,
        markov_rank=markov_rank,
    )
    case = Case(config, 256, 16, torch.device("cpu"), torch.float32)
    objective = build_objective(case)
    check(objective, case)
    step_of(objective, case, seed=0)()
    began = time.perf_counter()
    step_of(objective, case, seed=1)()
    return (time.perf_counter() - began) * 1000


def measure(case: Case) -> Measured:
    """Build, check for leaks, warm up, time, and look at one step's kernels."""
    torch.manual_seed(0)
    objective = build_objective(case)
    began = time.perf_counter()
    step_of(objective, case, seed=0)()
    torch.cuda.synchronize()
    first_step_s = time.perf_counter() - began
    check(objective, case)
    for seed in range(NUM_WARM_UPS):
        step_of(objective, case, seed)()
    torch.cuda.reset_peak_memory_stats()
    step_ms = times_ms([step_of(objective, case, seed) for seed in range(NUM_TIMED)])
    peak_gib = torch.cuda.max_memory_allocated() / GIB
    batch = random_batch(case, seed=0)
    mask_ms = times_ms([lambda: sparse_mask(layout_of(case, batch))] * NUM_TIMED)
    return Measured(
        first_step_s,
        step_ms,
        statistics.median(mask_ms),
        peak_gib,
        step_flops(case.config, step_size(case, batch)),
        kernel_times(step_of(objective, case, seed=1)),
    )


def build_objective(case: Case) -> Objective:
    """Random weights in the case's type, embedding and head of the target included."""
    config = case.config
    with torch.device(case.device):
        drafter = Drafter(config).to(case.dtype)
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=RANDOM_STD)
        table_shape = (config.vocab_size, config.hidden_size)
        embedding_VD = torch.randn(table_shape, dtype=case.dtype)
        head_VD = torch.randn(table_shape, dtype=case.dtype) * RANDOM_STD
    ends = TargetEnds(lambda ids: torch.nn.functional.embedding(ids, embedding_VD), head_VD)
    return Objective(drafter, ends, LossRecipe(gamma=7.0))


def check(objective: Objective, case: Case) -> None:
    shape = ProbeShape(1, case.row_len, case.num_anchors, case.device)
    check_leaks(objective.block_states, case.config, shape)


def step_of(objective: Objective, case: Case, seed: int) -> Callable[[], None]:
    """A step; its tokens and anchors are there already when it starts."""
    batch = random_batch(case, seed)
    num_features = len(case.config.target_layer_ids) * case.config.hidden_size

    def step() -> None:
        # Made within the step, as a target would: twenty steps' features would count as memory.
        features_BLF = torch.randn(
            (1, case.row_len, num_features), device=case.device, dtype=case.dtype
        )
        objective.drafter.zero_grad(set_to_none=True)
        sums = objective.loss_sums(features_BLF, batch)
        (sums.numerator / sums.weight).backward()  # type: ignore[no-untyped-call]

    return step


def random_batch(case: Case, seed: int) -> BlockBatch:
    """One document that fills the row and carries loss throughout."""
    document = Document(0, 0, case.row_len, (seed, 0, "benchmark"))
    anchors_A = torch.from_numpy(draw_packed_anchors([document], case.num_anchors))
    generator = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(case.config.vocab_size, (1, case.row_len), generator=generator)
    rows = (ids_BL, torch.arange(case.row_len)[None], anchors_A[None])
    return BlockBatch(*(r.to(case.device) for r in rows))


def layout_of(case: Case, batch: BlockBatch) -> BlockLayout:
    size = case.config.block_size
    return BlockLayout(batch.anchors_BA, batch.starts_BA, case.row_len, size, window=None)


def step_size(case: Case, batch: BlockBatch) -> StepSize:
    return StepSize(
        num_context=case.row_len,
        num_block_tokens=case.num_anchors * case.config.block_size,
        num_scored=case.num_anchors * case.config.num_drafts,
        num_seen_pairs={FULL: num_seen_pairs(layout_of(case, batch))},
    )


def figures_of(case: Case, measured: Measured, peer: Peer | None) -> list[Figure]:
    step_ms = statistics.median(measured.step_ms)
    mfu = utilisation(measured.flops, step_ms / 1000)
    figures = [
        Figure("drafter.step_ms", step_ms, 128.0, "lower", "ms"),
        Figure("drafter.mfu", mfu, 0.57, "higher", "ratio"),
        Figure("drafter.context_rate", case.row_len / step_ms * 1000, None, "higher", "tokens/s"),
        Figure("drafter.peak_memory", measured.peak_gib, 15.0, "lower", "GiB"),
        Figure("drafter.first_step", measured.first_step_s, 60.0, "lower", "s"),
        Figure("drafter.mask_share", measured.mask_ms / step_ms, 0.02, "lower", "ratio"),
    ]
    if peer:
        memory = measured.peak_gib / peer.peak_gib
        figures += [
            Figure("drafter.step_vs_peers", peer.step_ms / step_ms, 1.3, "higher", "ratio"),
            Figure("drafter.memory_vs_peers", memory, 1.0, "lower", "ratio"),
        ]
    return figures


def details_of(case: Case, measured: Measured) -> str:
    config = case.config
    flops = asdict(measured.flops) | {"total": measured.flops.total}
    arithmetic = ", ".join(f"{name} {count / 1e12:.2f}" for name, count in flops.items())
    rows = [f"| {name} | {ms:.2f} |" for name, ms in measured.kernels_ms.items()]
    return "\n".join(
        [
            f"Forward, loss and backward: hidden {config.hidden_size}, {config.num_layers} layers, "
            f"blocks of {config.block_size}, {case.num_anchors} anchors in {case.row_len} tokens, "
            f"vocabulary {config.vocab_size}, head of rank {config.markov_rank}, {case.dtype}; "
            f"median of {NUM_TIMED} steps "
            f"({min(measured.step_ms):.1f} to {max(measured.step_ms):.1f} ms), other anchors in "
            "each. The peak holds weights, gradients, embedding and head.",
            "",
            f"Arithmetic of a step in TFLOP (trainer/drafter/flops.py): {arithmetic}.",
            "",
            "| GPU time of one step | ms |",
            "|---|---|",
            *rows,
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
