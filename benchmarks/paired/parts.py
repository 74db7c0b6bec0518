"""The parts of a run: what each needs, does and leaves, for a machine with GPUs and for any.

Between __main__.py, which goes through them, and measured.py and trained.py, which are what ranks
do. A part leaves plain numbers, which results.py makes figures of. Invariant: a part that fails
raises RuntimeError with what its ranks have said, and leaves no process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import orjson
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.online import Case, full_case, quick_case
from benchmarks.paired.divisions import ALONE, Division, divisions
from benchmarks.paired.measured import Plan, measure
from benchmarks.paired.processes import started
from benchmarks.paired.trained import (
    Training,
    records,
    train,
    watch_a_death,
    write_made_up_answers,
)
from dflash_workers.contract.records import Json
from trainer.drafter.config import DrafterConfig, DrafterShape
from trainer.online.recipe import TrainRecipe
from trainer.online.step import OptimizerRecipe
from trainer.recipes import named_recipe, smollm2_cpu

MANY_STEPS = 10_000  # of a schedule that never comes to its end
NUM_REAL_STEPS = 120
SMALL_VOCAB = 512


@dataclass(frozen=True, slots=True)
class Part:
    """One of them; what it leaves is kept under its name."""

    name: str
    limit_s: float
    do: Callable[[Path, float], Json]  # in a folder, within so many seconds


@dataclass(frozen=True, slots=True)
class Real:
    """A target that is no random one, and its answers."""

    model_dir: Path
    answers: Path


def all_parts(num_gpus: int, real: Real | None) -> list[Part]:
    """Of a full run, those that matter most first."""
    case = replace(full_case(), num_steps=6)
    # 12 rows a step: as many for each of 1, 2, 3 and 4 drafters.
    changes = ["num_microbatches=12", "optimizer.warmup_share=0", f"num_steps={MANY_STEPS}"]
    recipe = named_recipe("qwen3_8b_h200", changes)
    found = [_measured(division, case, recipe, 90.0) for division in divisions(num_gpus)]
    pair = Division(num_gpus // 2, num_gpus // 2)
    found.insert(2, _death(pair, _small_recipe(), 150.0))
    if real:
        found[3:3] = [_real(division, real, 120.0) for division in (ALONE, pair)]
    return found


def quick_parts() -> list[Part]:
    """Shapes for a CPU; over gloo."""
    case = quick_case()
    recipe = TrainRecipe(
        drafter=_shape_of(case.config),
        data=case.data,
        loss=smollm2_cpu().loss,
        optimizer=OptimizerRecipe(learning_rate=6e-4, warmup_share=0.0),
        num_microbatches=4,
        num_steps=MANY_STEPS,
    )
    return [
        _measured(division, case, recipe, 60.0)
        for division in (ALONE, Division(1, 1), Division(2, 2))
    ]


def _measured(division: Division, case: Case, recipe: TrainRecipe, limit_s: float) -> Part:
    def do(folder: Path, timeout_s: float) -> Json:
        model_dir = folder / "model"
        _config_of(case).save_pretrained(model_dir)
        divided = replace(recipe, topology=division.recipe)
        plan = Plan(case, divided, model_dir, folder)
        _run(division.num_ranks, folder, timeout_s, measure, plan)
        seen = [
            orjson.loads((folder / f"rank-{rank}.json").read_bytes())
            for rank in range(division.num_ranks)
        ]
        facts = {"num_microbatches": recipe.num_microbatches, "ranks": seen}
        return asdict(division) | facts

    return Part(division.name, limit_s, do)


def _death(division: Division, recipe: TrainRecipe, limit_s: float) -> Part:
    def do(folder: Path, timeout_s: float) -> Json:
        model_dir = folder / "model"
        _small_model().save_pretrained(model_dir)
        answers = write_made_up_answers(folder / "answers.json", SMALL_VOCAB)
        divided = replace(recipe, topology=division.recipe)
        training = Training(divided, model_dir, answers, folder / "out")
        return asdict(watch_a_death(training, division.num_ranks, folder, timeout_s))

    return Part("death", limit_s, do)


def _real(division: Division, real: Real, limit_s: float) -> Part:
    changes = ["num_microbatches=4", f"num_steps={NUM_REAL_STEPS}", "evaluate_every=0"]
    recipe = replace(named_recipe("smollm2_h200", changes), topology=division.recipe)

    def do(folder: Path, timeout_s: float) -> Json:
        training = Training(recipe, real.model_dir, real.answers, folder / "out")
        _run(division.num_ranks, folder, timeout_s, train, training)
        seen = records(training.out)
        shutil.rmtree(training.out)  # checkpoints
        return {name: [record[name] for record in seen] for name in ("loss", "tokens_per_s")}

    return Part(f"real_{division.name}", limit_s, do)


def _run(
    num_ranks: int, folder: Path, timeout_s: float, work: Callable[..., None], what: object
) -> None:
    with started(num_ranks, folder, work, what) as ranks:
        codes = ranks.wait(timeout_s)
        if any(code != 0 for code in codes):
            raise RuntimeError(f"the ranks ended with {codes}:\n{ranks.log()}")


def _config_of(case: Case) -> Qwen3Config:
    """The target that the case's drafter is for."""
    config = case.config
    return Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_target_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=False,
    )


def _shape_of(config: DrafterConfig) -> DrafterShape:
    return DrafterShape(
        num_layers=config.num_layers,
        block_size=config.block_size,
        target_layer_ids=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
    )


def _small_model() -> Qwen3ForCausalLM:
    """Large enough for a GPU's attention kernels, small enough for a checkpoint at every breath."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=SMALL_VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )


def _small_recipe() -> TrainRecipe:
    recipe = smollm2_cpu()
    return replace(
        recipe,
        drafter=DrafterShape(num_layers=1, block_size=4, mask_token_id=SMALL_VOCAB - 1),
        data=replace(recipe.data, max_len=64, keep_features_mb=0),
        num_steps=MANY_STEPS,
        num_microbatches=4,
        save_every=5,
    )
