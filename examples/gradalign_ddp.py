"""GradAlign under torchrun: every rank is one part of the batch. Takes a few seconds.

    torchrun --standalone --nproc-per-node 2 examples/gradalign_ddp.py             # two verbs, in a DDP loop
    torchrun --standalone --nproc-per-node 2 examples/gradalign_ddp.py --closure   # the same in one call

On GPUs, use "nccl" and move model and data to ``cuda:LOCAL_RANK`` as in any DDP program.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from gradalign_loop import BATCH, UPDATES, accuracy, data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gradalign


def train(images: Tensor, labels: Tensor, *, closure: bool) -> nn.Module:
    """Train; every rank draws the same large batch and takes its own part of it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4)
    opt = gradalign.GradAlign(sgd, beta=0.2, model=model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(UPDATES):
        rows = torch.randperm(len(labels), generator=generator)[:BATCH]
        mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
        inputs, targets = images[mine], labels[mine]
        if closure:
            opt.step(lambda x=inputs, y=targets: F.cross_entropy(model(x), y))
            continue
        opt.zero_grad()
        with model.no_sync():  # GradAlign does the averaging: two all-reduces a step
            F.cross_entropy(model(inputs), targets).backward()
            opt.displace()
            F.cross_entropy(model(inputs), targets).backward()
        opt.step()
    return model.module


def main() -> None:
    """Join the group, train, and let rank 0 print."""
    dist.init_process_group("gloo")
    images, labels, test_images, test_labels = data()
    model = train(images, labels, closure="--closure" in sys.argv)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    if dist.get_rank() == 0:
        equal = all(torch.equal(weights, other) for other in everyone)
        print(f"{len(everyone)} ranks: test accuracy {accuracy(model, test_images, test_labels):.4f}, equal: {equal}")
    dist.barrier()  # nobody leaves while another still uses the connection
    # Past the interpreter's end: once DDP was used, threads of gloo outlive the process group, and one that drops a
    # tensor while the interpreter ends can abort the process after all work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
