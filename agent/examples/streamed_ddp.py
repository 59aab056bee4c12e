# SPDX-License-Identifier: Apache-2.0
"""An ordinary DistributedDataParallel script whose data are streamed from where they lie, to all ranks:

    python -m millpond.data.streaming DATA --listen 127.0.0.1:7001
    torchrun --nproc-per-node 2 streamed_ddp.py 127.0.0.1:7001/digits
    millpond launch -- streamed_ddp.py csd0:public/digits

With ``even=True`` an epoch has as many batches on each rank, so that no rank waits for one that has ended.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import millpond.data


def main() -> None:
    """Train, save in the background, and print each rank's batches and the mean loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("where", help="host:port/folder of a data service, or csd0:public/folder in a launch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="of each rank")
    parser.add_argument("--save", metavar="FOLDER", help="for checkpoints; all ranks see it")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    stream = millpond.data.stream(options.where, batch=options.batch, even=True)
    model = DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saving, group = None, dist.new_group()  # of the threads that save: steps have the other one
    for epoch in range(options.epochs):
        total = torch.zeros(3)
        for images, labels in stream:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels), 1])
        print(f"epoch {epoch + 1}: {int(total[2])} batches, {int(total[1])} samples", flush=True)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}", flush=True)
        if options.save:  # a copy is made now; threads write it while the next epoch trains
            state = {"model": model.state_dict(), "stream": stream.state_dict()}
            if saving:
                saving.result()
            saving = checkpoint.async_save(
                state, checkpoint_id=f"{options.save}/{epoch + 1}", process_group=group
            )
    if saving:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
