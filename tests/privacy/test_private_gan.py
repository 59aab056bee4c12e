# SPDX-License-Identifier: Apache-2.0
"""A GAN in a private launch: two models, each with its group, end as in one process with all the data."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from millpond.linux.zygote.client import Zygote

from .gan import EXAMPLE, difference, quality, split, trained
from .launch_support import Launcher

EPOCHS = 6


def test_it_ends_as_in_one_process(tmp_path: Path, zygote: Zygote) -> None:
    images, labels = load_digits(return_X_y=True)
    images = (images * 255 / 16).astype(np.uint8)
    parts = split(images, (0.2, 0.37, 0.26, 0.17))
    launcher = Launcher(tmp_path, zygote, parts)
    ran = launcher.run(
        EXAMPLE.read_text(),
        "--epochs",
        str(EPOCHS),
        most_saved=1 << 20,
        script="private_gan.py",
        folders=("private/digits",),
    )
    assert ran.ended.error == "", (ran, [device.log for device in launcher.devices.values()])
    assert list(ran.files) == ["host/gan.pt"] and len(ran.lines["all"]) == EPOCHS
    found, alone = torch.load(io.BytesIO(ran.files["host/gan.pt"])), trained(parts, EPOCHS)
    assert difference(found, alone) < 1e-5
    assert difference(found, trained(parts, 1)) > 1e-2
    assert abs(quality(found, images, labels) - quality(alone, images, labels)) < 1
    print({name: device.sent for name, device in launcher.devices.items()})
