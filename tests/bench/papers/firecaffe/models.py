# SPDX-License-Identifier: Apache-2.0
"""Pure: table 1 and figure 2 of FireCaffe: the bytes of weights and activations of its models, counted on
torch's meta device, where tensors have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bench.experiment import Line, Panel, Run
from bench.papers.exhibit import Shown, computed
from millpond.train.task import volumes
from millpond.train.zoo import classic

BATCH = 1024
_PASSES = 3
"""Multiply-adds of forward and backward over those of forward: the gradients of weights, and of data."""
_MB, _TERA = 1e6, 1e12


@dataclass(frozen=True, slots=True)
class Printed:
    """A row of table 1, and how the same network is built: the MB of ``data`` and ``weights``, TFLOPS of a
    batch; ``top_1`` is the accuracy of tables 2 and 3, None where they have none.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    data: float
    weights: float
    ratio: float
    tera: float
    top_1: float | None = None


_PHOTO = (3, 224, 224)
NIN = Printed("NiN", classic.nin, _PHOTO, 5800, 30, 195, 6.7, 58.9)
ALEXNET = Printed("AlexNet", classic.alexnet, _PHOTO, 1680, 249, 10.2, 7.0, 58.9)
GOOGLENET = Printed("GoogLeNet", lambda: classic.googlenet(heads=True), _PHOTO, 19100, 54, 358, 9.7, 68.3)
VGG = Printed("VGG-19", classic.vgg19, _PHOTO, 42700, 575, 71.7, 120)
SPEECH = Printed("MSFT-Speech", classic.speech_dnn, (429,), 74, 151, 0.49, 0.00015)
PRINTED = (NIN, ALEXNET, GOOGLENET, VGG, SPEECH)


def counted(printed: Printed) -> tuple[float, float, float]:
    """Return the MB of activations of a batch, the MB of weights, and the TFLOPS of a batch."""
    with torch.device("meta"):
        model = printed.build().eval()  # heads for training count as weights alone
        with volumes.watched(model) as found, torch.no_grad():
            model(torch.empty(1, *printed.shape))
    flops = 2 * _PASSES * found.multiply_adds * BATCH
    return found.data * BATCH / _MB, found.weights / _MB, flops / _TERA


def table_1(_run: Run) -> Shown:
    """Show the volumes of all five networks."""
    rows = []
    for printed in PRINTED:
        data, weights, tera = counted(printed)
        rows += [
            computed(f"{printed.name}: data of a batch, D", "MB", printed.data, data),
            computed(f"{printed.name}: weights, W", "MB", printed.weights, weights),
            computed(f"{printed.name}: D over W", "", printed.ratio, data / weights),
            computed(f"{printed.name}: forward and backward", "TFLOPS/batch", printed.tera, tera),
        ]
    return Shown(
        tuple(rows),
        "",
        "The four networks for images agree: D is the sum of the inputs of all convolutions and fully "
        "connected layers, for equation 2 as printed multiplies channels by filters and gives other "
        "values; GoogLeNet's W has its two heads for training, its D and TFLOPS do not. The printed "
        "ratios of AlexNet and VGG-19 are not those of their own rows, 6.7 and 74.3. The printed W of "
        "MSFT-Speech is that of nine matrices of 2048 x 2048 (151.0 MB), where the paper that it cites "
        "has seven layers of 2048 between 429 inputs and 9304 outputs; its printed 0.00015 TFLOPS are "
        "four times its weights, which is the work of one sample and not of a batch of 1024.",
    )


def figure_2(_run: Run) -> Shown:
    """Show the sizes beside the accuracies."""
    sizes = {printed.name: counted(printed)[1] for printed in (NIN, ALEXNET, GOOGLENET, VGG)}
    shown = [printed for printed in (NIN, ALEXNET, GOOGLENET) if printed.top_1 is not None]
    accuracies = [printed.top_1 for printed in shown if printed.top_1 is not None]
    lines = (
        Line("paper", "tables 1 to 3", [printed.weights for printed in shown], accuracies, marks=True),
        Line("millpond", "counted", [sizes[printed.name] for printed in shown], accuracies, marks=True),
    )
    return Shown(
        (
            computed("AlexNet's parameters over NiN's", "x", 8, sizes["AlexNet"] / sizes["NiN"]),
            computed("VGG's parameters over GoogLeNet's", "x", 10, sizes["VGG-19"] / sizes["GoogLeNet"]),
        ),
        "no network is trained: the accuracies are those that the paper prints",
        "The sizes agree with the paper's 8 and 10. The figure's top-5 accuracies are not "
        "printed as numbers, so the picture has "
        "the top-1 accuracies of tables 2 and 3, and no point for VGG.",
        (Panel("Size and accuracy", "size of all parameters (MB)", "top-1 accuracy (%)", lines),),
    )
