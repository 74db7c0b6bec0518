"""One update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from dflash_workers.contract.errors import Permanent
from trainer.drafter import mask
from trainer.drafter.config import DrafterShape
from trainer.drafter.fitting import drafter_config
from trainer.drafter.loss import LossRecipe
from trainer.drafter.model import Drafter
from trainer.drafter.objective import TargetEnds
from trainer.drafter.start import start_at_random
from trainer.online.batches import DataRecipe, MicroBatch, Place
from trainer.online.intake import ListIntake
from trainer.online.step import Fed, OptimizerRecipe, StepMetrics, Stepper, learning_rate
from trainer.online.target import FrozenTarget, load_target, target_config
from trainer.tokens.shards import Sample

MakeSamples = Callable[..., list[Sample]]


@dataclass
class Bench:
    """A stepper and the target that feeds it."""

    stepper: Stepper
    target: FrozenTarget
    needs_teacher: bool

    @property
    def drafter(self) -> Drafter:
        return self.stepper.drafter

    def fed(self, batch: MicroBatch) -> Fed:
        features, states = self.target.features_and_states(batch.ids_BL)
        return Fed(batch, features, states if self.needs_teacher else None)

    def step(self, batches: Sequence[MicroBatch], *, at: int, num_steps: int) -> StepMetrics:
        return self.stepper.step(map(self.fed, batches), at=at, num_steps=num_steps)


MakeStepper = Callable[..., Bench]


@pytest.fixture
def make_stepper(qwen_dir: Path) -> MakeStepper:
    shape = DrafterShape(num_layers=1, block_size=4, target_layer_ids=[1, 3])

    def make(
        *,
        loss: LossRecipe | None = None,
        dtype: torch.dtype = torch.float32,
        clip_norm: float = 1.0,
        recompute: bool = False,
    ) -> Bench:
        loss = loss or LossRecipe(2.0)
        config = drafter_config(target_config(str(qwen_dir)), shape, str(qwen_dir))
        drafter = Drafter(config)
        start_at_random(drafter, 0)
        target = load_target(str(qwen_dir), [1, 3], dtype=dtype, device=torch.device("cpu"))
        stepper = Stepper(
            drafter,
            TargetEnds(target.embed, target.head_VD),
            loss=loss,
            optimizer=OptimizerRecipe(1e-3, clip_norm=clip_norm, recompute=recompute),
        )
        return Bench(stepper, target, loss.needs_teacher)

    return make


def weights(stepper: Bench) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(stepper.drafter.parameters()).detach().clone()


def batch_of(samples: list[Sample]) -> MicroBatch:
    recipe = DataRecipe(batch_size=8, num_anchors=6, max_len=64, pad_multiple=64, min_samples=1)
    return next(ListIntake(samples, recipe, seed=0).microbatches(Place(), mine=lambda _: True))


def test_the_split_into_microbatches_changes_nothing_but_rounding(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    whole = batch_of(make_samples(8))
    parts = [
        replace(
            whole,
            ids_BL=whole.ids_BL[s],
            positions_BL=whole.positions_BL[s],
            documents_BL=whole.documents_BL[s],
            anchors_BA=whole.anchors_BA[s],
            samples=whole.samples[s],
        )
        for s in (slice(0, 2), slice(2, 8))  # of unlike weight
    ]
    one, two = make_stepper(), make_stepper()

    metrics = one.step([whole], at=50, num_steps=100)
    metrics_of_parts = two.step(parts, at=50, num_steps=100)

    assert metrics_of_parts.loss == pytest.approx(metrics.loss, rel=1e-6)
    assert metrics_of_parts.gradient_norm == pytest.approx(metrics.gradient_norm, rel=1e-4)
    assert metrics_of_parts.accuracy_by_place == metrics.accuracy_by_place


def test_steps_on_the_same_data_lower_the_loss(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    stepper, batch = make_stepper(), batch_of(make_samples(8))

    losses = [stepper.step([batch], at=10, num_steps=100).loss for _ in range(15)]

    assert losses[-1] < losses[0] - 0.5


def test_padding_changes_neither_loss_nor_update(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    batch = batch_of(make_samples(8))
    longest = int((batch.documents_BL >= 0).sum(1).max())
    other_ids = batch.ids_BL.clone()
    other_ids[:, longest:] = 77
    other = replace(batch, ids_BL=other_ids)
    one, two = make_stepper(), make_stepper()

    assert one.step([batch], at=5, num_steps=9) == two.step([other], at=5, num_steps=9)
    assert torch.equal(weights(one), weights(two))


def test_with_a_bf16_target_the_weights_of_record_stay_fp32_and_learn_the_same(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    batch = batch_of(make_samples(8))
    exact, half = make_stepper(), make_stepper(dtype=torch.bfloat16)
    before = weights(exact)

    wanted = [exact.step([batch], at=10, num_steps=100) for _ in range(8)]
    got = [half.step([batch, batch], at=10, num_steps=100) for _ in range(8)]

    assert weights(half).dtype == torch.float32
    moved, moved_half = weights(exact) - before, weights(half) - before
    assert torch.cosine_similarity(moved, moved_half, dim=0) > 0.9
    for one, other in zip(wanted, got, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=2e-2)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=5e-2)


def test_weights_that_were_filled_between_steps_are_those_that_compute(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    batch = batch_of(make_samples(8))
    stepper, other = (make_stepper(dtype=torch.bfloat16) for _ in range(2))
    other.step([batch], at=10, num_steps=100)

    stepper.drafter.load_state_dict(other.drafter.state_dict())

    assert (
        stepper.step([batch], at=0, num_steps=9).loss == other.step([batch], at=0, num_steps=9).loss
    )


def test_a_drafter_that_leaks_is_not_trained(
    make_stepper: MakeStepper,
    make_samples: MakeSamples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = mask.key_ranges

    def sees_the_anchor(layout: mask.BlockLayout) -> mask.KeyRanges:
        return replace(rule(layout), context_to=rule(layout).context_to + 1)

    monkeypatch.setattr(mask, "key_ranges", sees_the_anchor)
    stepper = make_stepper()
    before = weights(stepper)

    with pytest.raises(Permanent, match="the feature at the anchor leaks"):
        stepper.step([batch_of(make_samples(8))], at=0, num_steps=9)

    assert torch.equal(weights(stepper), before)


@pytest.mark.parametrize(
    "loss",
    [
        LossRecipe(2.0, weights="dpace"),
        LossRecipe(2.0, distillation=1.0, total_variation=1.0, cross_entropy=0.0),
    ],
    ids=["dpace", "teacher"],
)
def test_other_losses_learn_too(
    make_stepper: MakeStepper, make_samples: MakeSamples, loss: LossRecipe
) -> None:
    stepper, batch = make_stepper(loss=loss), batch_of(make_samples(8))

    seen = [stepper.step([batch], at=10, num_steps=100) for _ in range(15)]

    assert seen[-1].loss < seen[0].loss
    assert 1 <= seen[-1].accept_length <= 4
    assert 0 < seen[-1].entropy < math.log(512)


def test_clipping_bounds_the_update_and_reports_the_norm_before(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    stepper = make_stepper(clip_norm=0.25)
    sums = stepper.stepper.loss_sums(stepper.fed(batch_of(make_samples(8))))
    mean_loss = sums.numerator / sums.weight
    parameters = list(stepper.drafter.parameters())
    true_norm = torch.stack([g.norm() for g in torch.autograd.grad(mean_loss, parameters)]).norm()

    metrics = stepper.step([batch_of(make_samples(8))], at=10, num_steps=100)

    clipped = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    assert metrics.gradient_norm == pytest.approx(float(true_norm), rel=1e-4)
    assert metrics.gradient_norm > 0.5
    assert float(clipped) == pytest.approx(0.25, rel=1e-3)


def test_the_rate_warms_up_and_ends_near_zero() -> None:
    recipe = OptimizerRecipe(learning_rate=1.0, warmup_share=0.04)

    rates = [learning_rate(recipe, at, 100) for at in range(100)]

    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] < 0.001


def test_recomputing_activations_changes_no_bit_and_keeps_less(
    make_stepper: MakeStepper, make_samples: MakeSamples
) -> None:
    batch = batch_of(make_samples(8))
    kept: list[int] = []

    def steps(*, recompute: bool) -> tuple[StepMetrics, torch.Tensor]:
        bench = make_stepper(recompute=recompute)
        bench.step([batch], at=10, num_steps=100)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t
        ):
            metrics = bench.step([batch], at=11, num_steps=100)
        kept.append(sum(sizes))
        return metrics, weights(bench)

    plain, less = steps(recompute=False), steps(recompute=True)

    assert plain[0] == less[0]
    assert torch.equal(plain[1], less[1])
    assert kept[1] < kept[0]
