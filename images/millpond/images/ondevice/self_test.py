# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.self_test``: test the device where its machine asks for it.

Its last line on the console says how it went, then it switches the machine off. A machine that does not say
so, or goes on, has not passed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from millpond.images.ondevice import bless

PASSED, FAILED = "millpond: the self-test passed", "millpond: the self-test failed"
FAMILY = "millpond-self-test"
"""What the firmware says the machine's family is, in a machine that shall test itself."""


def root_is_read_only() -> None:
    """Check that the root cannot be written."""
    assert os.statvfs("/").f_flag & os.ST_RDONLY


def the_root_is_verified() -> None:
    """Check that the root is a device whose blocks dm-verity checks, none of which was bad."""
    device = Path("/").stat().st_dev
    name = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/dm/name").read_text().strip()
    assert _output("/sbin/dmsetup", "status", name).split()[2:] == ["verity", "V"]


def nobody_has_a_password() -> None:
    """Check that no entry of the shadow file can match a password."""
    hashes = [line.split(":")[1] for line in Path("/etc/shadow").read_text().splitlines()]
    assert hashes and set(hashes) == {"*"}, hashes


def units_work() -> None:
    """Check that no unit has failed and that the agent is ready."""
    assert _output("systemctl", "--failed", "--no-legend", "--plain") == ""
    assert _output("systemctl", "is-active", "millpond-agent.service") == "active"


def boot_entries_are_right() -> None:
    """Check that the firmware starts the slot that runs."""
    assert '"trial": false' in _output(
        sys.executable, "-m", "millpond.images.ondevice.boot_entries", "status"
    )


def a_watchdog_runs() -> None:
    """Check that a watchdog would restart a machine that hangs."""
    states = [path.read_text().strip() for path in Path("/sys/class/watchdog").glob("watchdog*/state")]
    assert "active" in states, f"watchdogs: {states}"


def jobs_can_run() -> None:
    """Check that the volume holds what is written to it, and that a worker trains."""
    fault = bless.jobs_fault()
    assert not fault, fault


CHECKS: tuple[Callable[[], None], ...] = (
    root_is_read_only,
    the_root_is_verified,
    nobody_has_a_password,
    units_work,
    boot_entries_are_right,
    a_watchdog_runs,
    jobs_can_run,
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
