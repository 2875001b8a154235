"""GradAlign with parameters sharded over the ranks by fully_shard: micro-batches are the parts. Takes a few seconds.

torchrun --standalone --nproc-per-node 2 examples/gradalign_fsdp.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from gradalign_loop import BATCH, PARTS, UPDATES, data
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import gradalign


def main() -> None:
    """Train; every rank takes its share of the large batch, and each of the parts spans all ranks."""
    dist.init_process_group("gloo")
    images, labels, test_images, test_labels = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    opt = gradalign.GradAlign(sgd, beta=0.2, model=model)  # after fully_shard, which replaces the parameters
    generator = torch.Generator().manual_seed(1)

    def loss(inputs, targets):
        return F.cross_entropy(model(inputs), targets)

    for _ in range(UPDATES):
        rows = torch.randperm(len(labels), generator=generator)[:BATCH]
        mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
        opt.step(loss, images[mine], labels[mine], parts=PARTS)
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).double().mean()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: test accuracy {float(right):.4f}")
    dist.barrier()  # nobody leaves while another still uses the connection
    sys.stdout.flush()
    os._exit(0)  # past the interpreter's end, where a thread of gloo can abort the process


if __name__ == "__main__":
    main()
