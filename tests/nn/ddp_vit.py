"""Trains a small ViT⁻ in two processes, with DDP or FSDP2 over gloo, and compares with one process.

    python tests/nn/ddp_vit.py ddp | fsdp | fsdp-blocks

A script for tests/nn/test_models.py; it prints "equal" where the losses and the weights are those of a single process.
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from overtone.models import VisionTransformer, ViTConfig
from overtone.training.distributed import destroy

RANKS, STEPS = 2, 3


def build() -> VisionTransformer:
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 16, "num_heads": 2, "depth": 3}
    model = VisionTransformer(ViTConfig(**sizes, regime=["sharpen", "free", "sharpen"]), dtype=torch.float64)
    model.blocks[2].attn = type(model.blocks[2].attn)(16, 2, "smooth", "general", dtype=torch.float64)
    return model


def losses_of(model: torch.nn.Module, rank: int, ranks: int) -> list[float]:
    """Mean losses of the global batch, of which this rank sees its part."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.arange(8) % 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(images[rank::ranks]), labels[rank::ranks])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(total)
    return (total / ranks).tolist()


def worker(rank: int, way: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    model: torch.nn.Module = build()
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for block in model.blocks if way == "fsdp-blocks" else ():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    losses = losses_of(model, rank, RANKS)
    if rank == 0:
        wanted = losses_of(build(), 0, 1)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted))
        print("equal", flush=True)
    destroy()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    mp.spawn(worker, (sys.argv[1], free_port), nprocs=RANKS)
