# SPDX-License-Identifier: Apache-2.0
"""A rank that runs the example with plain DistributedDataParallel, and then streams that are not alike."""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint

import millpond.data
from millpond.base.errors import LocalError


def parts(where: str) -> list[list[int]]:
    """Leave an epoch after two batches on all ranks, and go on with its rest."""
    stream = millpond.data.stream(where, batch=8, even=True)
    found = list[list[int]]()
    for _, (_, labels) in zip(range(2), stream, strict=False):
        found.append(labels.tolist())
    return found + [labels.tolist() for _, labels in stream]


def refused(where: str) -> str:
    """Ask for batches of another size on each rank."""
    try:
        list(millpond.data.stream(where, batch=8 + dist.get_rank(), even=True))
    except LocalError as error:
        return str(error)
    return ""


def saved(folder: str) -> dict[str, Any]:
    """Load the stream's state that the last epoch of the example has saved."""
    found: dict[str, Any] = {"stream": {"epoch": 0, "cursor": 0, "returned": (), "samples": 0}}
    checkpoint.load(found, checkpoint_id=f"{folder}/2")
    return dict(found["stream"])


def main(where: str, example: str, folder: str) -> None:
    sys.argv = [example, f"{where}/digits", "--epochs", "2", "--batch", "8", "--save", folder]
    runpy.run_path(example, run_name="__main__")
    os.environ["MASTER_PORT"] = os.environ["SECOND_PORT"]  # at the first one a rank may meet the old store
    dist.init_process_group("gloo")
    images = f"{where}/images"
    print(json.dumps({"saved": saved(folder), "parts": parts(images), "refused": refused(images)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
