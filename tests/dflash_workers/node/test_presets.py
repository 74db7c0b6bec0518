"""presets.py: what is asked for, in the words of the installed version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_workers.contract.errors import BadInput
from dflash_workers.node.presets import Wish, engine_flags, is_hybrid

PLAIN = {"model_type": "qwen3", "layer_types": ["full_attention"] * 4}
HYBRID = {"text_config": {"layer_types": ["linear_attention", "full_attention"]}}
WISH = Wish("sglang", "0.5.17", ("throughput",), 48, PLAIN)
DRAFTER = Path("/models/drafter")


def value_of(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.5.9", "--cuda-graph-max-bs"),
        ("0.5.13.post1", "--cuda-graph-max-bs"),
        ("0.5.14", "--cuda-graph-max-bs-decode"),
        ("0.5.23", "--cuda-graph-max-bs-decode"),
        ("0.6.0", "--cuda-graph-max-bs-decode"),
    ],
)
def test_every_batch_up_to_the_workers_limit_has_its_graph(version: str, name: str) -> None:
    assert value_of(engine_flags(replace(WISH, version=version)), name) == "48"


def test_a_cpu_has_no_graphs() -> None:
    assert not [f for f in engine_flags(replace(WISH, is_cpu=True)) if "cuda-graph" in f]


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.5.11", "--mamba-scheduler-strategy"), ("0.5.17", "--mamba-radix-cache-strategy")],
)
def test_speculation_on_a_hybrid_model_names_its_cache_strategy(version: str, name: str) -> None:
    wish = replace(WISH, version=version, presets=("mtp",), model_config=HYBRID)

    assert value_of(engine_flags(wish), name) == "extra_buffer"
    assert not [f for f in engine_flags(replace(wish, model_config=PLAIN)) if "mamba" in f]


def test_mtp_is_three_steps_of_one_branch() -> None:
    flags = engine_flags(replace(WISH, presets=("throughput", "mtp")))

    assert value_of(flags, "--speculative-algorithm") == "EAGLE"
    assert value_of(flags, "--speculative-num-steps") == "3"
    assert value_of(flags, "--speculative-eagle-topk") == "1"


def test_a_drafter_is_served_by_the_preset_of_its_name() -> None:
    flags = engine_flags(replace(WISH, presets=("dflash",), drafter=DRAFTER))

    assert value_of(flags, "--speculative-algorithm") == "DFLASH"
    assert value_of(flags, "--speculative-draft-model-path") == str(DRAFTER)


@pytest.mark.parametrize(
    ("presets", "drafter", "words"),
    [
        (("turbo",), None, "no preset 'turbo'"),
        (("dflash",), None, "want each other"),
        (("mtp",), DRAFTER, "want each other"),
        (("mtp", "dflash"), DRAFTER, "one way"),
    ],
)
def test_presets_that_can_not_be_are_refused(
    presets: tuple[str, ...], drafter: Path | None, words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        engine_flags(replace(WISH, presets=presets, drafter=drafter))


def test_a_persons_own_flags_come_last() -> None:
    own = ("--mem-fraction-static 0.8", "--json-model-override-args '{\"a\": 1}'")

    flags = engine_flags(replace(WISH, engine_args=own))

    wanted = ["--mem-fraction-static", "0.8", "--json-model-override-args", '{"a": 1}']
    assert flags[-4:] == wanted
    with pytest.raises(BadInput, match="No closing quotation"):
        engine_flags(replace(WISH, engine_args=("--name 'half",)))


def test_vllm_is_told_in_its_own_words() -> None:
    wish = replace(WISH, engine="vllm", version="0.33.0", presets=("dflash",), drafter=DRAFTER)

    flags = engine_flags(wish)

    assert value_of(flags, "--max-num-seqs") == "48"
    speculation = json.loads(value_of(flags, "--speculative-config"))
    assert speculation == {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 15}
    with pytest.raises(BadInput, match="hicache is SGLang's"):
        engine_flags(replace(WISH, engine="vllm", presets=("hicache",)))


def test_hybrid_models_are_known_by_their_layers() -> None:
    assert is_hybrid(HYBRID)
    assert is_hybrid({"layers_block_type": ["mamba", "attention"]})
    assert not is_hybrid(PLAIN)
    assert not is_hybrid({})
