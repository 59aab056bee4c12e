# SPDX-License-Identifier: Apache-2.0
"""Entry: one training job, with plain DistributedDataParallel on a stream (``stream``) or on data that each
rank holds (``memory``), in the process of each rank; or with Ray Train and Ray Data (``ray``), for an
interpreter that has them. Rank 0 tests the model and prints what it measured as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batches = Iterable[tuple[Tensor, Tensor]]
Spec = dict[str, Any]
"""A job: its ``kind``; the ``folder`` of the sets ``train`` and ``test``, and the ``address`` that serves it;
the ``model`` of the zoo, ``module.factory``, and its ``arguments``; ``epochs`` of at most ``steps``, a rank's
``batch``, ``rate``, ``seed``, and the stream's ``memory``.
"""
_TESTED = 256


def model_of(spec: Spec) -> nn.Module:
    """Return the model, the same on each rank."""
    import importlib

    torch.set_num_threads(1)
    torch.manual_seed(spec["seed"])
    module, _, factory = spec["model"].partition(".")
    found: nn.Module = getattr(importlib.import_module(f"millpond.train.zoo.{module}"), factory)(
        **spec["arguments"]
    )
    return found


def loop(model: nn.Module, spec: Spec, epochs: Iterable[Batches]) -> dict[str, float]:
    """Train. Returns samples, and when the loop began and ended on the machine's clock."""
    optimizer = torch.optim.SGD(model.parameters(), spec["rate"], momentum=0.9)
    began, samples = time.monotonic(), 0
    for epoch in epochs:
        for images, labels in islice(epoch, spec["steps"]):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            samples += len(images)
    return {"samples": samples, "began": began, "ended": time.monotonic()}


def tested(model: nn.Module, batches: Batches) -> dict[str, float]:
    """Return the accuracy and the mean loss, as rank 0 takes them after training (Ember, section 4.7)."""
    model.eval()
    right, loss, samples = 0, 0.0, 0
    with torch.no_grad():
        for images, labels in batches:
            logits = model(images)
            right += int((logits.argmax(1) == labels).sum())
            loss += float(cross_entropy(logits, labels, reduction="sum"))
            samples += len(labels)
    return {"accuracy": 100 * right / samples, "loss": loss / samples}


def held(folder: str, name: str, batch: int, order: Tensor | None = None) -> Batches:
    """Yield batches of a set that is held as it is stored."""
    images, labels = (
        torch.from_numpy(np.load(Path(folder, name, f"{which}.npy"))) for which in ("images", "labels")
    )
    for wanted in torch.split(torch.arange(len(labels)) if order is None else order, batch):
        yield images[wanted].float().div_(255), labels[wanted]


def ranked(spec: Spec) -> dict[str, float]:
    """Be a rank of a job without Ray."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = model_of(spec)
    parallel = DistributedDataParallel(model)
    found = loop(parallel, spec, streamed(spec) if spec["kind"] == "stream" else divided(spec))
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    if first and spec["kind"] == "stream":
        import millpond.data

        found |= tested(model, millpond.data.stream(f"{spec['address']}/test", batch=_TESTED))
    elif first:
        found |= tested(model, held(spec["folder"], "test", _TESTED))
    return found


def streamed(spec: Spec) -> Iterable[Batches]:
    """Yield the epochs of an even stream."""
    import millpond.data

    where = f"{spec['address']}/train"
    stream = millpond.data.stream(
        where, batch=spec["batch"], seed=spec["seed"], memory=spec["memory"], even=True
    )
    for _ in range(spec["epochs"]):
        yield stream


def divided(spec: Spec) -> Iterable[Batches]:
    """Yield the epochs of a rank that holds the whole set."""
    import torch.distributed as dist

    folder, batch = Path(spec["folder"], "train"), spec["batch"]
    images, labels = (torch.from_numpy(np.load(folder / f"{which}.npy")) for which in ("images", "labels"))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for epoch in range(spec["epochs"]):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(spec["seed"] + epoch))
        own = order[rank : len(labels) - len(labels) % ranks : ranks]
        yield ((images[wanted].float().div_(255), labels[wanted]) for wanted in torch.split(own, batch))


def with_ray(spec: Spec) -> dict[str, float]:
    """Train with Ray; its data are rows of bytes, the label behind the pixels."""
    import ray  # type: ignore[import-not-found]
    from ray.train import RunConfig, ScalingConfig  # type: ignore[import-not-found]
    from ray.train.torch import TorchTrainer  # type: ignore[import-not-found]

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    images, labels = (
        np.load(Path(spec["folder"], "train", f"{which}.npy")) for which in ("images", "labels")
    )
    shape, batch = images.shape[1:], spec["batch"]
    rows = np.concatenate([images.reshape(len(labels), -1), labels[:, None].astype(np.uint8)], axis=1)
    data = ray.data.from_numpy(np.array_split(rows, 16))
    del images, rows
    out = Path(spec["folder"]) / "ray.json"

    def work() -> None:
        model = model_of(spec)
        parallel = ray.train.torch.prepare_model(model)
        shard = ray.train.get_dataset_shard("train")

        def epoch() -> Batches:
            for each in shard.iter_torch_batches(batch_size=batch, local_shuffle_buffer_size=10 * batch):
                pixels, label = each["data"][:, :-1], each["data"][:, -1]
                yield pixels.reshape(-1, *shape).float() / 255, label.long()

        found = loop(parallel, spec, (epoch() for _ in range(spec["epochs"])))
        if ray.train.get_context().get_world_rank() == 0:
            found |= tested(model, held(spec["folder"], "test", _TESTED))
            out.write_text(json.dumps(found))

    trainer = TorchTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{spec['folder']}/ray"),
        datasets={"train": data},
    )
    trainer.fit()
    ray.shutdown()
    told: dict[str, float] = json.loads(out.read_text())
    return told


if __name__ == "__main__":
    given: Spec = json.loads(sys.argv[1])
    print(json.dumps(with_ray(given) if given["kind"] == "ray" else ranked(given)))
