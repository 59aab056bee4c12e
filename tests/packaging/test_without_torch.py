# SPDX-License-Identifier: Apache-2.0
"""The daemons and the command line start without what is in extras, such as torch: only workers need it."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = """
import importlib, sys
sys.modules.update(dict.fromkeys(("torch", "PIL", "packaging", "sklearn", "matplotlib", "pyarrow", "fuse",
                                  "prometheus_client", "tensorboard", "mlflow", "textual", "plotille")))
importlib.import_module(sys.argv[1])
"""


def imported(module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCKED, module], capture_output=True, text=True)


@pytest.mark.parametrize(
    "module",
    [
        "millpond.host.cli.app",
        "millpond.host.monitor.feed",
        "millpond.host.monitor.top.plain",
        "millpond.host.program.fleet",
        "millpond.host.remote.mounter",
        "millpond.agent.daemon",
    ],
)
def test_starts_without_extras(module: str) -> None:
    done = imported(module)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_notices_torch() -> None:
    assert "torch" in imported("millpond.train.local.local_trainer").stderr
