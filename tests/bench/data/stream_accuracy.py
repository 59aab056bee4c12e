# SPDX-License-Identifier: Apache-2.0
"""Edge (torch, a process): accuracy of training on a stream against training on the same data in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import millpond.data
from bench.data.service import served
from bench.experiment import Run
from bench.rows import Row, summary

TITLE = "accuracy of streamed training"
SEEDS = range(3)
_EPOCHS, _BATCH = 15, 32


def measure(run: Run) -> list[Row]:
    """Train on digits with each seed, from memory and streamed."""
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    found, test = load_digits(), slice(None, None, 5)
    pixels = (found.images * 15).astype(np.uint8)
    held = np.zeros(len(pixels), bool)
    held[test] = True
    plain, streamed = [], []
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        (Path(folder) / "digits").mkdir()
        np.save(Path(folder) / "digits" / "images.npy", pixels[~held])
        np.save(Path(folder) / "digits" / "labels.npy", found.target[~held])
        images = torch.from_numpy(pixels[:, None].astype(np.float32) / np.float32(255))
        labels = torch.from_numpy(found.target)
        data, split = TensorDataset(images[~held], labels[~held]), (images[held], labels[held])
        seeds, epochs = (SEEDS[:1], 2) if run.quick else (SEEDS, _EPOCHS)
        with served(folder) as where:
            for seed in seeds:
                order = torch.Generator().manual_seed(seed)
                loader = DataLoader(data, _BATCH, shuffle=True, generator=order)
                plain.append(_accuracy(seed, loader, split, epochs))
                stream = millpond.data.stream(f"{where}/digits", batch=_BATCH, seed=seed)
                streamed.append(_accuracy(seed, stream, split, epochs))
    run.say(f"in memory {100 * fmean(plain):.2f} %, streamed {100 * fmean(streamed):.2f} %")
    lost = [100 * abs(fmean(plain) - fmean(streamed))]
    about = f"points of accuracy between them, digits, mean of {len(plain)} seeds"
    peer = "the same model on data in memory"
    return [summary("stream_accuracy_points", about, lost, "points", peer=peer)]


def _accuracy(seed: int, batches: Any, split: tuple[Tensor, Tensor], epochs: int) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for images, labels in _epochs(batches, epochs):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        return float((model(split[0]).argmax(1) == split[1]).double().mean())


def _epochs(batches: Any, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(epochs):
        yield from batches
