"""How much arithmetic a step of the drafter must do: the yardstick of its speed.

Read by benchmarks/drafter_step.py and by whoever reports a run's utilisation. Counted is what the
mathematics asks for, forward and backward: 6 operations for each parameter of a matrix product and
each token that goes through it, 4 for the frozen head (no gradient of its own) and each scored
place, and the attention of the pairs that may see each other. Invariant: what an implementation
does beyond that (recomputation, tiles that are masked in part) is not counted, so a slower way
never looks busier. By convention the 6 holds for `fc` and the first layer too, whose inputs need no
gradient: 1 % of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.drafter.config import DrafterConfig

H200_PEAK = 989e12  # dense bf16 operations a second, by the vendor's datasheet


@dataclass(frozen=True, slots=True)
class StepSize:
    """What goes through the drafter in one step."""

    num_context: int  # tokens with features
    num_block_tokens: int  # anchors and masks of all blocks
    num_scored: int  # places that go through the head
    num_seen_pairs: dict[str, int]  # queries times the keys they see, by kind of layer


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Operations of one step, forward and backward."""

    layers: int  # matrix products of the blocks' tokens
    context: int  # fc, and every layer's keys and values of the context
    head: int
    attention: int

    @property
    def total(self) -> int:
        return self.layers + self.context + self.head + self.attention


def step_flops(config: DrafterConfig, size: StepSize) -> StepFlops:
    """Norms, rotations and activations are left out: bytes, not arithmetic, are their cost."""
    hidden = config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    injected = 2 * hidden * key
    layer = injected + 2 * hidden * query + 3 * hidden * config.intermediate_size
    head = config.vocab_size * (4 * hidden + 6 * config.markov_rank)  # the correction is trained
    fused = len(config.target_layer_ids) * hidden * hidden
    pairs = sum(size.num_seen_pairs[kind] for kind in config.layer_types)
    return StepFlops(
        layers=6 * config.num_layers * layer * size.num_block_tokens,
        context=6 * (fused + config.num_layers * injected) * size.num_context,
        head=head * size.num_scored,
        # Scores and mixing, 2 operations each per head dimension; twice that backward.
        attention=3 * 4 * query * pairs,
    )


def utilisation(flops: StepFlops, seconds: float, peak: float = H200_PEAK) -> float:
    """Share of a chip's peak that a step of `seconds` reaches (MFU)."""
    return flops.total / seconds / peak
