"""Configurations that can't be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dflash_workers.contract.errors import BadInput, Corrupt
from dflash_workers.contract.records import decode, encode
from trainer.drafter.config import FULL, SLIDING, DrafterConfig, DrafterShape


def test_a_stored_configuration_comes_back_the_same(small_config: DrafterConfig) -> None:
    assert decode(DrafterConfig, encode(small_config)) == small_config
    with pytest.raises(Corrupt):
        decode(DrafterConfig, {**encode(small_config), "blocksize": 4})


@pytest.mark.parametrize(
    "change",
    [
        {"target_layer_ids": [3, 1]},
        {"target_layer_ids": [1, 1]},
        {"target_layer_ids": []},
        {"target_layer_ids": [4]},  # the last layer of five: nobody can serve it
        {"mask_token_id": 512},
        {"layer_types": [FULL]},
        {"layer_types": [SLIDING, FULL], "sliding_window": 3},
        {"num_kv_heads": 3},
        {"rope_scaling": {"rope_type": "dynamic"}},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.0}},
        {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.4}},  # 3 of 8
        {"layer_types": [FULL, "chunked_attention"]},
    ],
)
def test_an_inconsistent_configuration_cannot_exist(
    small_config: DrafterConfig, change: dict[str, Any]
) -> None:
    with pytest.raises(BadInput):
        dataclasses.replace(small_config, **change)


@pytest.mark.parametrize(("num_layers", "block_size"), [(0, 4), (1, 1)])
def test_a_shape_without_layers_or_drafts_is_refused(num_layers: int, block_size: int) -> None:
    with pytest.raises(BadInput):
        DrafterShape(num_layers, block_size)
