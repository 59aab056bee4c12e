# SPDX-License-Identifier: Apache-2.0
"""The models that come with millpond have the published layers, and learn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from millpond.train.task import volumes
from millpond.train.task.volumes import Volumes
from millpond.train.zoo import classic, models, residual

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


def work(model: nn.Module, *shape: int) -> tuple[Volumes, tuple[int, ...]]:
    """What a model on the meta device keeps and computes for one sample, and the shape of its logits."""
    with volumes.watched(model) as found:
        logits = model.eval()(torch.zeros(1, *shape, device="meta"))
    return found, tuple(logits.shape)


PHOTO = (3, 224, 224)


@pytest.mark.parametrize(
    ("build", "shape", "parameters", "millions"),
    [
        (models.mnist_cnn, (1, 28, 28), 93_322, 6),
        (models.cifar_cnn, (3, 32, 32), 2_029_642, 57),
        (models.mobilenet_v2, PHOTO, 3_504_872, 301),
        (models.shufflenet, PHOTO, 1_865_728, 137),
        (partial(models.shufflenet, width=2), PHOTO, 5_450_776, 524),
        (models.efficientnet_b0, PHOTO, 5_288_548, 386),
        (classic.nin, PHOTO, 7_595_176, 1_100),
        (classic.alexnet, PHOTO, 62_378_344, 1_135),
        (classic.googlenet, PHOTO, 6_998_552, 1_583),
        (partial(classic.googlenet, heads=True), PHOTO, 13_378_280, 1_583),
        (classic.vgg19, PHOTO, 143_667_240, 19_632),
        (classic.speech_dnn, (429,), 45_122_648, 45),
        (residual.resnet18, PHOTO, 11_689_512, 1_814),
        (residual.resnet50, PHOTO, 25_557_032, 3_858),
        (residual.deeplab_v3_plus, (3, 512, 512), 40_352_181, 68_418),
    ],
)
def test_sizes_are_those_published(
    build: Callable[[], nn.Module], shape: tuple[int, ...], parameters: int, millions: int
) -> None:
    with torch.device("meta"):
        found, _ = work(build(), *shape)
    assert (found.weights, round(found.multiply_adds / 1e6)) == (4 * parameters, millions)


@pytest.mark.parametrize(
    "build",
    [
        models.efficientnet_b0,
        *(classic.nin, classic.alexnet, classic.googlenet, classic.vgg19),
        *(residual.resnet18, residual.resnet50),
    ],
)
@pytest.mark.parametrize("side", [32, 64])
def test_models_for_photos_take_small_images(build: Callable[..., nn.Module], side: int) -> None:
    with torch.device("meta"):
        large, _ = work(build(7), *PHOTO)
        small, logits = work(build(7, side), 3, side, side)
    assert logits == (1, 7) and small.weights == large.weights and small.multiply_adds < large.multiply_adds


@pytest.mark.parametrize(("build", "least"), [(classic.alexnet, 7), (classic.nin, 11)])
def test_models_without_padding_take_images_of_any_side(build: Callable[..., nn.Module], least: int) -> None:
    for side in range(least, 80):
        with torch.device("meta"):
            assert work(build(7, side), 3, side, side)[1] == (1, 7)


def test_googlenet_has_two_more_heads_in_training() -> None:
    with torch.device("meta"):
        heads = classic.googlenet(7, 64, heads=True).train()(torch.zeros(2, 3, 64, 64))
    assert [tuple(logits.shape) for logits in heads] == 3 * [(2, 7)]


def test_deeplab_has_logits_for_each_pixel() -> None:
    with torch.device("meta"):
        _, logits = work(residual.deeplab_v3_plus(3, 64, 16), 16, 64, 48)
    assert logits == (1, 3, 64, 48)


@functools.cache
def published(name: str) -> int:
    """The bytes of a model's weights for seven classes and images of 224 pixels."""
    with torch.device("meta"):
        return work(getattr(models, name)(7), *PHOTO)[0].weights


@pytest.mark.parametrize("name", ["mobilenet_v2", "shufflenet"])
@pytest.mark.parametrize("side", [8, 28, 32, 33, 64, 96, 160])
def test_images_of_any_side_leave_maps_of_three_pixels(name: str, side: int) -> None:
    build, maps = getattr(models, name), list[int]()
    with torch.device("meta"):
        model = build(7, side)
    pool = next(layer for layer in model.modules() if isinstance(layer, nn.AdaptiveAvgPool2d))
    pool.register_forward_pre_hook(lambda _, images: maps.append(images[0].shape[-1]))
    found, logits = work(model, 3, side, side)
    assert logits == (1, 7) and found.weights == published(name)
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
