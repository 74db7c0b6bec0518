"""A target whose ranks have a part each says what a whole one says."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from dflash_workers.contract.errors import BadInput
from tests.trainer.online.parts import GATHERED, IDS, LAYER_IDS, NUM_RANKS, TARGET, run
from trainer.online.target import load_target

LIMIT_S = 240


@pytest.fixture(scope="module")
def kinds(qwen_dir: Path, llama_dir: Path) -> dict[str, Path]:
    return {"qwen": qwen_dir, "llama": llama_dir}


@pytest.fixture(scope="module")
def seen(kinds: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each rank of the split targets has written."""
    out = tmp_path_factory.mktemp("seen")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.online.parts"])
    folders = list(kinds.values())
    ranks = [context.Process(target=run, args=(r, port, folders, out)) for r in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * NUM_RANKS
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_every_rank_of_a_split_target_has_the_features_of_a_whole_one(
    kinds: dict[str, Path], seen: Path, kind: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(kinds[kind], dtype=torch.float32)
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
    wanted = torch.cat([states[i + 1] for i in LAYER_IDS], dim=-1)
    layer_size = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)

    for rank in TARGET:
        found = load_file(seen / f"{kinds[kind].name}-{rank}.safetensors")

        assert (found["features"] - wanted).abs().max() < 1e-5 * wanted.abs().max()
        assert int(found["num_in_parts"]) * len(TARGET) == layer_size
        assert torch.equal(found["gathered"], model.model.layers[-1].get_parameter(GATHERED))
        assert torch.equal(found["embedded"], model.get_input_embeddings()(IDS))
        assert torch.equal(found["head"], model.get_output_embeddings().weight)


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A group of as many ranks as you like, of which one is here."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", rank=0, world_size=4, store=store)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_heads_that_ranks_cannot_share_are_refused(
    lonely_group: dist.ProcessGroup, qwen_dir: Path
) -> None:
    with pytest.raises(BadInput, match="2 key and value heads, which 4 ranks"):
        load_part(qwen_dir, lonely_group)


def test_a_model_that_transformers_cannot_split_is_refused(
    lonely_group: dist.ProcessGroup, tmp_path: Path
) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=4)).save_pretrained(
        tmp_path
    )

    with pytest.raises(BadInput, match="no tensor-parallel plan for gpt2"):
        load_part(tmp_path, lonely_group)


def load_part(folder: Path, group: dist.ProcessGroup) -> None:
    load_target(str(folder), [0], dtype=torch.float32, device=torch.device("cpu"), group=group)
