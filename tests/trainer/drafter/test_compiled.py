"""The compiled way through the drafter, on a GPU, against the modules as they stand on a CPU.

Asks for no fixture, so that it runs where torch and transformers are all there is:
`python -m pytest --noconftest -p no:logging -m gpu tests/trainer/drafter/test_compiled.py`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from trainer.drafter.blocks import BlockBatch
from trainer.drafter.config import FULL, SLIDING, DrafterConfig
from trainer.drafter.heads import MarkovHead
from trainer.drafter.leaks import ProbeShape, check_leaks
from trainer.drafter.loss import LossRecipe, LossSums
from trainer.drafter.model import Drafter
from trainer.drafter.objective import Objective, TargetEnds
from trainer.drafter.start import start_at_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),  # a compiler's advice, another in each version
]

# No multiple of a tile, neither of them.
ROW_LEN, NUM_ANCHORS, BLOCK_SIZE, VOCAB = 330, 21, 16, 1000
CONFIG = DrafterConfig(
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_layers=2,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    attention_bias=False,
    max_position_embeddings=4096,
    rope_theta=1e4,
    rope_scaling=None,
    layer_types=[SLIDING, FULL],
    sliding_window=40,
    num_target_layers=9,
    target_layer_ids=[1, 5],
    mask_token_id=VOCAB - 1,
    block_size=BLOCK_SIZE,
)


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(former)


def packed_batch(seed: int) -> BlockBatch:
    """Three documents, padding behind them, some slots without an anchor."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [100 + seed, 60, 150 - seed]
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(20, dtype=torch.long)])
    places = torch.arange(310)[:-1][(positions[1:310] > 0)]
    anchors = torch.full((NUM_ANCHORS,), -1)
    anchors[:-2] = places[torch.randperm(len(places), generator=generator)[:19]].sort().values
    ids = torch.randint(VOCAB, (ROW_LEN,), generator=generator)
    return BlockBatch(ids[None], positions[None], anchors[None])


def moved(batch: BlockBatch, device: str) -> BlockBatch:
    return BlockBatch(*(t.to(device) for t in (batch.ids_BL, batch.positions_BL, batch.anchors_BA)))


def objective_of(drafter: Drafter, device: str, dtype: torch.dtype) -> Objective:
    generator = torch.Generator().manual_seed(5)
    embedding, head = (torch.randn(VOCAB, 256, generator=generator) for _ in range(2))
    # Rounded for all of them: what is compared is the computation, not its input.
    embedding, head = (t.bfloat16().to(device, dtype) for t in (embedding, head / 16))
    ends = TargetEnds(lambda ids: torch.nn.functional.embedding(ids, embedding), head)
    return Objective(copy.deepcopy(drafter).to(device, dtype), ends, LossRecipe(7.0, chunk_rows=99))


def rough_drafter(markov_rank: int = 0) -> Drafter:
    drafter = Drafter(dataclasses.replace(CONFIG, markov_rank=markov_rank))
    start_at_random(drafter, 0)
    with torch.no_grad():
        if isinstance(drafter.markov_head, MarkovHead):
            drafter.markov_head.markov_w2.weight.normal_(std=0.02)
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)  # far from linear, so that differences show
            parameter.copy_(parameter.bfloat16())
    return drafter


def features(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(1, ROW_LEN, 512, generator=generator).bfloat16().float()


def run(objective: Objective, device: str, seed: int) -> tuple[LossSums, dict[str, Tensor]]:
    objective.drafter.zero_grad()
    sums = objective.loss_sums(features(seed).to(device), moved(packed_batch(seed), device))
    sums.numerator.backward()  # type: ignore[no-untyped-call]
    named = objective.drafter.named_parameters()
    return sums, {n: p.grad.float().cpu() for n, p in named if p.grad is not None}


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float().cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("markov_rank", [0, 8], ids=["plain", "dspark"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)], ids=["fp32", "bf16"]
)
def test_loss_and_gradients_are_those_of_the_plain_modules_in_fp32(
    dtype: torch.dtype, tolerance: float, markov_rank: int
) -> None:
    drafter = rough_drafter(markov_rank)
    plain, compiled = (
        objective_of(drafter, "cpu", torch.float32),
        objective_of(drafter, "cuda", dtype),
    )

    wanted, wanted_gradients = run(plain, "cpu", 0)
    got, gradients = run(compiled, "cuda", 0)

    errors = {n: error(gradients[n], g) for n, g in wanted_gradients.items()}
    print(dtype, "loss", error(got.numerator.detach(), wanted.numerator.detach()))
    print("worst gradients", sorted(((e, n) for n, e in errors.items()), reverse=True)[:3])
    assert error(got.numerator.detach(), wanted.numerator.detach()) < tolerance / 4
    assert float(got.weight) == pytest.approx(float(wanted.weight))
    assert gradients.keys() == wanted_gradients.keys()
    assert max(errors.values()) < tolerance


def test_other_documents_and_anchors_compile_nothing_anew() -> None:
    objective = objective_of(rough_drafter(), "cuda", torch.bfloat16)
    run(objective, "cuda", 0)

    with torch._dynamo.config.patch(error_on_recompile=True):
        losses = [float(run(objective, "cuda", seed)[0].numerator) for seed in (1, 2, 3)]

    assert len(set(losses)) == 3


def test_nothing_leaks_through_the_compiled_mask() -> None:
    objective = objective_of(rough_drafter(), "cuda", torch.bfloat16)

    shape = ProbeShape(1, ROW_LEN, NUM_ANCHORS, torch.device("cuda"))
    check_leaks(objective.block_states, CONFIG, shape)


def test_a_row_without_any_anchor_gives_zero_gradients_and_no_nan() -> None:
    objective = objective_of(rough_drafter(), "cuda", torch.bfloat16)
    batch = moved(packed_batch(0), "cuda")
    empty = BlockBatch(batch.ids_BL, batch.positions_BL, torch.full_like(batch.anchors_BA, -1))

    sums = objective.loss_sums(features(0).cuda(), empty)
    sums.numerator.backward()  # type: ignore[no-untyped-call]

    assert float(sums.weight) == 0.0
    gradients = [p.grad for p in objective.drafter.parameters() if p.grad is not None]
    assert gradients
    assert all((g == 0).all() for g in gradients)
