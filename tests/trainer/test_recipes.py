"""Recipes and their changes."""

from __future__ import annotations

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.contract.records import decode, encode
from trainer.online.recipe import TrainRecipe
from trainer.recipes import RECIPES, named_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_stored_and_read_back(name: str) -> None:
    recipe = named_recipe(name, [])

    assert decode(TrainRecipe, encode(recipe)) == recipe


def test_changes_reach_every_level() -> None:
    changes = [
        "num_steps=10",
        "optimizer.learning_rate=1",
        "drafter.target_layer_ids=[3, 5]",
        "drafter.copy_target_layers=true",
    ]

    recipe = named_recipe("smollm2_cpu", changes)

    assert recipe.num_steps == 10
    assert recipe.optimizer.learning_rate == 1.0
    assert recipe.drafter.target_layer_ids == [3, 5]
    assert recipe.drafter.copy_target_layers is True


@pytest.mark.parametrize(
    "change",
    [
        "num_step=10",
        "optimizer.lr=1e-3",
        "num_steps.more=1",
        "num_steps=ten",
        "num_steps=1.5",
        "num_steps=true",
        "num_steps",
        "num_steps=0",
        "optimizer={}",
        "drafter.target_layer_ids=[1.5]",
    ],
)
def test_an_unknown_key_or_an_ill_value_is_refused(change: str) -> None:
    with pytest.raises(BadInput):
        named_recipe("smollm2_cpu", [change])


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(BadInput, match="smollm2_cpu"):
        named_recipe("smollm", [])
