# SPDX-License-Identifier: Apache-2.0
"""Entry: one training job with two workers, ``ray FOLDER EPOCHS BATCH`` with Ray Train and Ray Data for an
interpreter that has them, ``ours ADDRESS EPOCHS BATCH`` a rank of ours; prints the seconds of its loop as
JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor], None]


def model() -> nn.Module:
    """Return a small network with three convolutions, as in Ember's comparison."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def loop(epochs: Iterable[Iterable[tuple[Tensor, Tensor]]], step: Step) -> dict[str, float]:
    """Train. Returns samples and seconds."""
    began, samples = time.monotonic(), 0
    for epoch in epochs:
        for images, labels in epoch:
            step(images, labels)
            samples += len(images)
    return {"samples": samples, "seconds": time.monotonic() - began}


def ours(address: str, epochs: int, batch: int) -> dict[str, float]:
    """Train a rank of a group on a stream."""
    import millpond.data
    import millpond.train

    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    with millpond.train.group(network) as group:

        def step(images: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            group.step(nn.functional.cross_entropy(network(images), labels, reduction="sum"))
            optimizer.step()

        stream = millpond.data.stream(f"{address}/set")
        return loop((group.loader(stream, batch=2 * batch) for _ in range(epochs)), step)


def with_ray(folder: str, epochs: int, batch: int) -> dict[str, float]:
    """Train with Ray."""
    import ray  # type: ignore[import-not-found]
    from ray.train import RunConfig, ScalingConfig  # type: ignore[import-not-found]
    from ray.train.torch import TorchTrainer  # type: ignore[import-not-found]

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    images, labels = np.load(f"{folder}/images.npy"), np.load(f"{folder}/labels.npy")
    rows = np.concatenate([images.reshape(len(labels), -1), labels[:, None].astype(np.uint8)], axis=1)
    data = ray.data.from_numpy(np.array_split(rows, 16))
    out = Path(folder) / "ray.json"

    def work() -> None:
        network = ray.train.torch.prepare_model(model())
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        shard = ray.train.get_dataset_shard("train")

        def step(images: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        def epoch() -> Iterable[tuple[Tensor, Tensor]]:
            for each in shard.iter_torch_batches(batch_size=batch, local_shuffle_buffer_size=10 * batch):
                pixels, label = each["data"][:, :-1], each["data"][:, -1]
                yield pixels.reshape(-1, 3, 32, 32).float() / 255, label.long()

        found = loop((epoch() for _ in range(epochs)), step)
        if ray.train.get_context().get_world_rank() == 0:
            out.write_text(json.dumps(found))

    trainer = TorchTrainer(
        work,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
        datasets={"train": data},
    )
    trainer.fit()
    ray.shutdown()
    told: dict[str, float] = json.loads(out.read_text())
    return told


if __name__ == "__main__":
    run = ours if sys.argv[1] == "ours" else with_ray
    print(json.dumps(run(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
