"""Data-parallel training of a sharpening ViT:  torchrun --nproc-per-node 2 two_processes.py"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import overtone as ot

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, count = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

torch.manual_seed(0)  # the same weights and data in every process
model = ot.models.vit_tiny(32, 8, num_classes=10, regime="sharpen", bounded=True, depth=2).to(device)
images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
for step in range(3):
    logits = parallel(images[rank::count].to(device))  # every process has its part of the batch
    loss = torch.nn.functional.cross_entropy(logits, labels[rank::count].to(device))
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over the processes
    optimizer.step()
    dist.all_reduce(loss := loss.detach() / count)
    if rank == 0:
        print(f"step {step} on {count} processes: loss {loss.item():.4f}")
dist.barrier()  # nobody leaves while another still works
time.sleep(0.2)  # gloo's threads let go of the last tensors; ending before that, Python may abort
dist.destroy_process_group()
