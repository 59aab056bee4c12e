# SPDX-License-Identifier: Apache-2.0
"""The steps of an image's build: a line now and then, and how long a step took the last time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from millpond.images.build import steps
from millpond.images.build.steps import BuildSteps


def test_a_step_that_lasts_is_told_of_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: a step of minutes said nothing until its end."""
    monkeypatch.setattr(steps, "PERIOD_SECONDS", 0.001)
    lines, ticked = list[str](), threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if "so far" in line:
            ticked.set()

    (tmp_path / "seconds").write_text('{"root": 42.4}')
    assert BuildSteps(tmp_path / "seconds", tell).run("root", lambda: ticked.wait(30))
    assert lines[:2] == [
        "millpond image: root ... (last time 42 s)",
        "millpond image: root: 0 s so far (last time 42 s)",
    ]
    assert lines[-1] == "millpond image: root: 0.0 s"


def test_a_step_that_fails_is_not_remembered(tmp_path: Path) -> None:
    lines = list[str]()
    built = BuildSteps(tmp_path / "seconds", lines.append)
    built.run("boot", int)
    with pytest.raises(ZeroDivisionError):
        built.run("disk", lambda: 1 // 0)
    assert lines == ["millpond image: boot ...", "millpond image: boot: 0.0 s", "millpond image: disk ..."]
    again = list[str]()
    BuildSteps(tmp_path / "seconds", again.append).run("boot", int)
    assert again[0] == "millpond image: boot ..." and "disk" not in (tmp_path / "seconds").read_text()
