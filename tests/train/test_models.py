# SPDX-License-Identifier: Apache-2.0
"""The models that come with millpond have the published layers, and learn."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from millpond.train.zoo import models


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_the_size_is_that_published() -> None:
    with torch.device("meta"):
        model = models.cifar_cnn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_029_642


def test_the_cifar_cnn_takes_images_from_16_pixels_on() -> None:
    for side, channels in ((16, 1), (17, 3), (28, 1)):
        assert models.cifar_cnn(5, side, channels)(torch.zeros(2, channels, side, side)).shape == (2, 5)
    with pytest.raises(ValueError, match="images of 15x15: this model takes 16x16 and more"):
        models.cifar_cnn(side=15)


def test_a_few_steps_reduce_the_loss() -> None:
    torch.manual_seed(1)
    model = models.cifar_cnn()
    labels = torch.arange(16) % 4
    images = torch.rand(4, 3, 32, 32)[labels] + 0.3 * torch.rand(16, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(10):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
