# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.bless``: keep a new slot that works, leave one that does not.

After an update the firmware starts the new slot once, as a trial. It is kept when the host has greeted the
agent; where that does not happen in time, the machine restarts, and the firmware takes the slot before. It
never restarts where it is not known to be a trial: there is no slot before, and it would do so for ever.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.ondevice import boot_entries

GREETED = Path("/run/millpond/greeted")
"""The agent makes it when the host has greeted it."""
PATIENCE_SECONDS = 300.0
_RAUC_SECONDS = 120.0


def wait(path: Path, seconds: float) -> bool:
    """Return whether ``path`` appears within so many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def keep(slot: str) -> None:
    """Make ``slot``, which runs, the first. Raises LocalError."""
    argv = ["/usr/bin/rauc", "status", "mark-good", "booted"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_RAUC_SECONDS)
    except subprocess.TimeoutExpired:
        raise LocalError(f"{' '.join(argv[1:])} did not end in {_RAUC_SECONDS:.0f} s") from None
    if done.returncode:
        raise LocalError(f"{' '.join(argv[1:])}: {done.stderr.strip()}")
    boot_entries.make_first(slot)


def judge(slot: str, greeted: Path, patience: float, keep: Callable[[str], None]) -> bool:
    """Keep ``slot``, which is on trial, if ``greeted`` appears in time; return whether it was kept."""
    print(f"millpond: slot {slot} is on trial until the host greets the agent", flush=True)
    if not wait(greeted, patience):
        print(f"millpond: the host did not greet the agent: slot {slot} is left", flush=True)
        return False
    try:
        keep(slot)
    except (LocalError, OSError) as error:
        print(f"millpond: slot {slot} cannot be kept: {error}", flush=True)
        return False
    print(f"millpond: slot {slot} is kept", flush=True)
    return True


def main() -> int:
    """Judge a trial slot. Exit codes: 0 no trial, or kept; 1 the machine restarts, as its unit has it do."""
    try:
        slot = boot_entries.running_slot()
        trial = boot_entries.is_trial(slot)
    except (LocalError, OSError) as error:
        print(f"millpond: whether this slot is on trial is unknown: {error}", flush=True)
        return 0
    if not trial or judge(slot, GREETED, PATIENCE_SECONDS, keep):
        return 0
    subprocess.run(["/usr/bin/systemctl", "reboot"], check=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
