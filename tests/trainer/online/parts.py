"""A process that has a part of a target, or none: what test_splitting.py has forked.

Of three ranks the last two are one target. Each of them writes the features that it sees of the
same ids, and a layer gathered from the parts, to `<model folder's name>-<rank>.safetensors`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from trainer.online.splitting import whole_layers
from trainer.online.target import load_target

NUM_RANKS = 3
TARGET = [1, 2]
LAYER_IDS = [0, 2, 3]
GATHERED = "mlp.down_proj.weight"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 0, 0, 0, 0]])


def run(rank: int, port: int, model_dirs: list[Path], out: Path) -> None:
    """A process's whole life."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    group = dist.new_group(TARGET)
    if rank in TARGET:
        for folder in model_dirs:
            target = load_target(
                str(folder),
                LAYER_IDS,
                dtype=torch.float32,
                device=torch.device("cpu"),
                group=group,
            )
            (last,) = whole_layers(target.layers, 1)
            parts = [p.to_local() for p in target.layers.parameters() if isinstance(p, DTensor)]
            found = {
                "features": target.features(IDS),
                "gathered": last.get_parameter(GATHERED).data,
                "num_in_parts": torch.tensor(sum(part.numel() for part in parts)),
                "embedded": target.embed(IDS),
                "head": target.head_VD.data.clone(),
            }
            save_file(found, out / f"{folder.name}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()
