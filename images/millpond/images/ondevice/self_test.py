# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.self_test``: test the device where its machine asks for it.

Its last line on the console says how it went, then it switches the machine off. A machine that does not say
so, or goes on, has not passed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PASSED, FAILED = "millpond: the self-test passed", "millpond: the self-test failed"
FAMILY = "millpond-self-test"
"""What the firmware says the machine's family is, in a machine that shall test itself."""

_STEP = """
import torch
from millpond.train.zoo.models import digits_cnn
model = digits_cnn()
loss = torch.nn.functional.cross_entropy(model(torch.rand(8, 1, 8, 8)), torch.arange(8))
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9).step()
assert all(part.grad is not None for part in model.parameters())
"""


def root_is_read_only() -> None:
    """Check that the root cannot be written."""
    assert os.statvfs("/").f_flag & os.ST_RDONLY


def nobody_has_a_password() -> None:
    """Check that no entry of the shadow file can match a password."""
    hashes = [line.split(":")[1] for line in Path("/etc/shadow").read_text().splitlines()]
    assert hashes and set(hashes) == {"*"}, hashes


def units_work() -> None:
    """Check that no unit has failed and that the agent is ready."""
    assert _output("systemctl", "--failed", "--no-legend", "--plain") == ""
    assert _output("systemctl", "is-active", "millpond-agent.service") == "active"


def the_volume_works() -> None:
    """Check that data written to the volume is there, and lies on the flash."""
    data = secrets.token_bytes(1 << 20)
    path = Path("/volume/public/self-test")
    path.write_bytes(data)
    try:
        assert path.read_bytes() == data
        assert Path("/flash/public/self-test").read_bytes() == data
    finally:
        path.unlink()


def boot_entries_are_right() -> None:
    """Check that the firmware starts the slot that runs."""
    assert '"trial": false' in _output(
        sys.executable, "-m", "millpond.images.ondevice.boot_entries", "status"
    )


def a_watchdog_runs() -> None:
    """Check that a watchdog would restart a machine that hangs."""
    assert list(Path("/sys/class/watchdog").glob("watchdog*")), "there is no watchdog"


def torch_works() -> None:
    """Check that torch computes gradients of the digits model."""
    _output(sys.executable, "-c", _STEP)


CHECKS: tuple[Callable[[], None], ...] = (
    root_is_read_only,
    nobody_has_a_password,
    units_work,
    the_volume_works,
    boot_entries_are_right,
    a_watchdog_runs,
    torch_works,
)


def _output(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert argv[1] == "is-active" or done.returncode == 0, f"{argv}: {done.stderr.strip()[-500:]}"
    return done.stdout.strip()


def run() -> bool:
    """Run all checks, each with a line of its own; return whether all passed."""
    good = True
    for check in CHECKS:
        try:
            check()
            print(f"millpond: self-test: {check.__name__}: yes", flush=True)
        except (AssertionError, OSError, ValueError, IndexError) as error:
            print(f"millpond: self-test: {check.__name__}: no: {error}", flush=True)
            good = False
    return good


def main() -> int:
    """Run the checks and power off; does not return to a machine that goes on."""
    good = run()
    print(PASSED if good else FAILED, flush=True)
    subprocess.run(["/usr/bin/systemctl", "poweroff"], check=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
