# SPDX-License-Identifier: Apache-2.0
"""The models that come with millpond have the published layers, and learn."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from millpond.train.zoo import models

from ..effort import scaled

STEPS = {"cifar_cnn": 10, "mobilenet_v2": scaled(quick=4, full=10), "shufflenet": scaled(quick=4, full=10)}
SMALL: dict[str, Callable[[], nn.Module]] = {
    "cifar_cnn": models.cifar_cnn,
    "mobilenet_v2": lambda: models.mobilenet_v2(10, 32),
    "shufflenet": lambda: models.shufflenet(10, 32),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def work(model: nn.Module, side: int) -> tuple[int, int, tuple[int, ...]]:
    """Parameters, multiply-adds of its convolutions and linear layers, and the shape of the logits."""
    counted: list[int] = []

    def count(layer: nn.Module, _: object, output: torch.Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            counted.append(output.numel() * layer.weight[0].numel())
        elif isinstance(layer, nn.Linear):
            counted.append(output.numel() * layer.in_features)

    for layer in model.modules():
        layer.register_forward_hook(count)
    logits = model.eval()(torch.zeros(1, 3, side, side, device="meta"))
    return sum(parameter.numel() for parameter in model.parameters()), sum(counted), tuple(logits.shape)


@pytest.mark.parametrize(
    ("build", "side", "parameters", "millions"),
    [
        (models.cifar_cnn, 32, 2_029_642, 57),
        (models.mobilenet_v2, 224, 3_504_872, 301),
        (models.shufflenet, 224, 1_865_728, 137),
    ],
)
def test_sizes_are_those_published(
    build: Callable[[], nn.Module], side: int, parameters: int, millions: int
) -> None:
    with torch.device("meta"):
        found, operations, _ = work(build(), side)
    assert (found, round(operations / 1e6)) == (parameters, millions)


@functools.cache
def published(name: str) -> int:
    """The parameters of a model for seven classes and images of 224 pixels."""
    with torch.device("meta"):
        return work(getattr(models, name)(7), 224)[0]


@pytest.mark.parametrize("name", ["mobilenet_v2", "shufflenet"])
@pytest.mark.parametrize("side", [8, 28, 32, 33, 64, 96, 160])
def test_images_of_any_side_leave_maps_of_three_pixels(name: str, side: int) -> None:
    build, maps = getattr(models, name), list[int]()
    with torch.device("meta"):
        model = build(7, side)
    pool = next(layer for layer in model.modules() if isinstance(layer, nn.AdaptiveAvgPool2d))
    pool.register_forward_pre_hook(lambda _, images: maps.append(images[0].shape[-1]))
    parameters, _, logits = work(model, side)
    assert logits == (1, 7) and parameters == published(name)
    assert 3 <= maps[0] <= 7


def test_the_cifar_cnn_takes_images_from_16_pixels_on() -> None:
    for side, channels in ((16, 1), (17, 3), (28, 1)):
        assert models.cifar_cnn(5, side, channels)(torch.zeros(2, channels, side, side)).shape == (2, 5)
    with pytest.raises(ValueError, match="images of 15x15: this model takes 16x16 and more"):
        models.cifar_cnn(side=15)


@pytest.mark.parametrize("name", SMALL)
def test_a_few_steps_reduce_the_loss(name: str) -> None:
    torch.manual_seed(1)
    model = SMALL[name]()
    labels = torch.arange(16) % 4
    images = torch.rand(4, 3, 32, 32)[labels] + 0.3 * torch.rand(16, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(STEPS[name]):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
