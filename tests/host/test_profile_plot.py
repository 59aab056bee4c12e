# SPDX-License-Identifier: Apache-2.0
"""The plot of workers' measured profiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageColor

from millpond.host.terminal import profile_plot
from millpond.train.balance.profiling import Point, Profile

HOST, DEVICE = "#12766f", "#c8553d"


def profile(worker: str, kind: str, slow: float, batches: tuple[int, ...] = (2, 4, 8, 16)) -> Profile:
    points = tuple(Point(batch, slow * (0.1 + 0.02 * batch), (300 + batch) << 20) for batch in batches)
    return Profile(worker, kind, points)


def pixels(path: Path, color: str) -> int:
    """How many there are of a color in a PNG."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        found = np.asarray(image.convert("RGB")) == ImageColor.getrgb(color)
        return int(found.all(axis=2).sum())


@pytest.mark.parametrize("slow", [2.0, 12.0])
def test_each_worker_has_a_line_and_its_chosen_batch_is_marked(tmp_path: Path, slow: float) -> None:
    profiles = [profile("host", "x86_64", 1), profile("csd0", "arm64", slow), Profile("csd1", "arm64", ())]
    for name, chosen in (("plain", {}), ("chosen", {"host": 12, "csd0": 4, "csd1": 0})):
        profile_plot.draw(profiles, chosen, "a model", tmp_path / f"{name}.png")
    for color in (HOST, DEVICE):
        assert 500 < pixels(tmp_path / "plain.png", color) < pixels(tmp_path / "chosen.png", color)


def test_of_many_workers_each_kind_has_a_color(tmp_path: Path) -> None:
    profiles = [profile("host", "x86_64", 1)] + [profile(f"csd{n}", "arm64", 3 + n / 20) for n in range(36)]
    profile_plot.draw(profiles, {}, "many", tmp_path / "many.png")
    assert pixels(tmp_path / "many.png", DEVICE) > pixels(tmp_path / "many.png", HOST) > 500
    assert pixels(tmp_path / "many.png", "#4464ad") == 0


def test_one_measured_batch_is_enough_and_none_gives_no_picture(tmp_path: Path) -> None:
    profile_plot.draw([profile("host", "x86_64", 1, (2,))], {"host": 2}, "one", tmp_path / "one.png")
    assert pixels(tmp_path / "one.png", HOST) > 100
    profile_plot.draw([Profile("host", "x86_64", ())], {}, "none", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
