# SPDX-License-Identifier: Apache-2.0
"""Commands in sandboxes: their resources, and the limits of their reach."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandbox_exec import confined

SOON = 30.0
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and uids of this machine")


@needs_root
def test_confined_hands_sigterm_on() -> None:
    script = """if True:
        import signal, time
        signal.signal(15, lambda *_: exit(5))
        print("ready", flush=True)
        while True:  # signal.pause() would miss a signal that arrives just before it
            time.sleep(0.01)
    """
    command = confined(Sandbox(own_pids=True), [sys.executable, "-c", script])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.wait(SOON) == 5


@needs_root
def test_root_without_capabilities_cannot_change_the_kernels_settings() -> None:
    sandbox = Sandbox(
        binds=(*system_binds(), *python_binds()), own_pids=True, own_network=True, capabilities=False
    )
    script = "open('/proc/sys/kernel/core_pattern', 'r+')"
    command = confined(sandbox, [sys.executable, "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr


@needs_root
def test_shared_memory_is_not_shared_with_a_sandbox() -> None:
    mine = subprocess.run(["ipcmk", "-M", "64"], capture_output=True, text=True, check=True).stdout
    number = mine.split()[-1]
    try:
        command = confined(Sandbox(binds=system_binds(), own_pids=True), ["ipcs", "-m"])
        done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
        assert done.returncode == 0
        assert "0x" not in done.stdout
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True)


def test_the_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_SECRET", "x")
    done = subprocess.run(confined(Sandbox(), ["env"]), capture_output=True, text=True, timeout=SOON)
    assert "PATH=" in done.stdout
    assert "MILLPOND_SECRET" not in done.stdout
