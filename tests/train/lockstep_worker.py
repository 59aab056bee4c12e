"""One worker of ``test_lockstep``: RANK, WORLD, PORT, and a line of JSON with its weights and what it saw."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from millpond.train.lockstep import Lockstep

STEPS = 20
BATCHES = {1: [[16]], 3: [[9, 5, 2], [0, 14, 2], [2, 2, 12]]}


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def main(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, timedelta(seconds=60), world_size=world, rank=rank)
    net = model(rank)  # different everywhere, until it is given out
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    data = torch.Generator().manual_seed(5)
    lockstep = Lockstep(net)
    lockstep.broadcast()
    seen = []
    for number in range(STEPS):
        x, y = torch.randn(16, 8, generator=data), torch.randint(0, 4, (16,), generator=data)
        batches = BATCHES[world][number % len(BATCHES[world])]
        mine = slice(sum(batches[:rank]), sum(batches[: rank + 1]))
        optimizer.zero_grad()
        if batches[rank]:
            cross_entropy(net(x[mine]), y[mine], reduction="sum").backward()
        step = lockstep.exchange(batches[rank], rank + 0.5)
        optimizer.step()
        seen.append([step.samples, step.batches, step.seconds])
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    print(json.dumps({"weights": weights.tolist(), "seen": seen}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
