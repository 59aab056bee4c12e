# SPDX-License-Identifier: Apache-2.0
"""KVM runs the guests only where it works; no guest is needed to see that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from . import machine

BOOTS = 'case "$*" in *accel=kvm*) echo "Kernel panic - not syncing: VFS: no root" ;; esac'
Choose = Callable[[str], str]


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Where QEMU is a shell script, and /dev/kvm a file."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(machine, "KVM", tmp_path / "kvm")
    monkeypatch.setattr(machine, "_PROBE_SECONDS", 5.0)
    (tmp_path / "kvm").touch()

    def run(script: str) -> str:
        (tmp_path / machine.QEMU).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / machine.QEMU).chmod(0o755)
        return machine.accelerator.__wrapped__()

    return run


def test_kvm_where_it_boots_the_kernel(choose: Choose) -> None:
    assert choose(BOOTS) == "kvm"


@pytest.mark.parametrize("script", ["kill -ABRT $$", "exit 0", "echo Linux version 6.1; exec sleep 60"])
def test_no_kvm_where_it_ends_or_hangs(choose: Choose, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(machine, "_PROBE_SECONDS", 0.5)
    assert choose(script) == "tcg"


def test_no_kvm_where_there_is_none(choose: Choose) -> None:
    machine.KVM.unlink()
    assert choose(BOOTS) == "tcg"
