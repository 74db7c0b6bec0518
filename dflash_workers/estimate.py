"""What a run will take: hours, GPU-hours, money, tokens, bytes. Arithmetic alone, no I/O.

Called by cli_bench with what was measured: a sweep (bench_result) or a run's progress. Nothing
is assumed to scale but prompts per second with the number of GPUs, which holds because workers
share nothing but a queue. What was not measured is None, never filled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.prices import Price

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be made."""

    num_prompts: int  # left to do
    input_tokens_per_prompt: float
    output_tokens_per_prompt: float  # all turns together
    s3_bytes_per_prompt: float | None  # of commits' data; None: nothing was committed yet

    @property
    def output_tokens(self) -> float:
        return self.num_prompts * self.output_tokens_per_prompt

    @property
    def tokens(self) -> float:
        """What training sees: prompts and answers."""
        return self.output_tokens + self.num_prompts * self.input_tokens_per_prompt

    @property
    def s3_bytes(self) -> float | None:
        if self.s3_bytes_per_prompt is None:
            return None
        return self.num_prompts * self.s3_bytes_per_prompt


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the whole work on one kind of GPU, which does not depend on how many there are."""

    gpu: str
    usd: float
    spot_usd: float | None  # None: no share was given


@dataclass(frozen=True, slots=True)
class Duration:
    """With so many nodes."""

    num_nodes: int
    num_gpus: int
    hours: float


@dataclass(frozen=True, slots=True)
class Features:
    """The hidden states that a drafter learns from, per token."""

    num_layers: int
    hidden_size: int
    bytes_per_number: int = 2  # bf16

    def stored_bytes(self, work: Work) -> float:
        """What training from stored states would have to keep; training online keeps none."""
        return work.tokens * self.num_layers * self.hidden_size * self.bytes_per_number


def prompts_per_s(tokens_per_s: float, work: Work) -> float:
    """The rate in prompts of one in output tokens."""
    if work.output_tokens_per_prompt <= 0:
        raise BadInput("an answer has no tokens: pass --output-tokens")
    return tokens_per_s / work.output_tokens_per_prompt


def gpu_hours(work: Work, gpu_prompts_per_s: float) -> float:
    """Of one GPU's rate. Raises BadInput where nothing moves."""
    if gpu_prompts_per_s <= 0:
        raise BadInput("nothing was measured: the rate is 0")
    return work.num_prompts / gpu_prompts_per_s / HOUR_S


def durations(total_gpu_hours: float, num_nodes: int, gpus_per_node: int) -> list[Duration]:
    """For one node up to so many."""
    return [
        Duration(nodes, nodes * gpus_per_node, total_gpu_hours / (nodes * gpus_per_node))
        for nodes in range(1, num_nodes + 1)
    ]


def costs(total_gpu_hours: float, prices: Sequence[Price], spot_share: float | None) -> list[Cost]:
    """`spot_share`: a spot GPU's price over the one on demand."""
    return [
        Cost(
            price.gpu,
            total_gpu_hours * price.usd_per_hour,
            None if spot_share is None else total_gpu_hours * price.usd_per_hour * spot_share,
        )
        for price in prices
    ]


def break_even_accept_length(
    plain_tokens_per_s: float, drafted_tokens_per_s: float, drafted_accept_length: float
) -> float:
    """The accept length from which on a drafter pays, at one number of requests in flight.

    A verification takes as long whatever it accepts, so tokens a second grow as the accept length:
    `drafted_tokens_per_s` were measured at `drafted_accept_length`.
    """
    return plain_tokens_per_s / (drafted_tokens_per_s / drafted_accept_length)


def with_drafter(
    drafted_tokens_per_s: float, drafted_accept_length: float, accept_length: float
) -> float:
    """Tokens per second of the same engine with a drafter of another accept length."""
    return drafted_tokens_per_s / drafted_accept_length * accept_length


def read_prices(text: str) -> list[Price]:
    """`h200=3.2,b200=6`: US dollars an hour on demand. Raises BadInput."""
    prices = []
    for part in filter(None, text.split(",")):
        gpu, _, usd = part.partition("=")
        try:
            prices.append(Price(gpu.strip(), float(usd)))
        except ValueError as error:
            raise BadInput(f"--gpu {part!r}: write NAME=DOLLARS_AN_HOUR") from error
        if not gpu.strip() or not prices[-1].usd_per_hour >= 0:
            raise BadInput(f"--gpu {part!r}: write NAME=DOLLARS_AN_HOUR")
    return prices
