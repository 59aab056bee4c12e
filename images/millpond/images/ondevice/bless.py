# SPDX-License-Identifier: Apache-2.0
"""Entry: ``python -m millpond.images.ondevice.bless``: keep a new slot that works, leave one that does not.

After an update the firmware starts the new slot once, as a trial. It is kept when the host has greeted the
agent and a test has used the volume and trained in a worker; where that does not happen in time, the machine
restarts, and the firmware takes the slot before, which finds the reason in the state that both share. It
never restarts where it is not known to be a trial: there is no slot before, and it would do so for ever.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.ondevice import boot_entries

GREETED = Path("/run/millpond/greeted")
"""The agent makes it when the host has greeted it."""
PATIENCE_SECONDS = 300.0
TEST = ("/usr/bin/python3", "-m", "millpond.agent.trial.check", "--config", "/etc/millpond/agent.toml")
"""The agent's test of what jobs need."""
ASK_SECONDS = 120.0
"""How long the firmware is asked whether this is a trial, before that counts as unknown."""
_TEST_SECONDS = 600.0
_ASK_PAUSE_SECONDS = 5.0


def wait(path: Path, seconds: float) -> bool:
    """Return whether ``path`` appears within so many seconds."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def known_trial(slot: str, seconds: float) -> bool:
    """Return whether ``slot`` is on trial; where that can't be told, ask again: a trial that is taken for
    none is neither kept nor left. Raises LocalError.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return boot_entries.is_trial(slot)
        except LocalError:
            if time.monotonic() > end:
                raise
            time.sleep(_ASK_PAUSE_SECONDS)


def jobs_fault(argv: Sequence[str] = TEST, seconds: float = _TEST_SECONDS) -> str:
    """Return why no job could run on this device, by the last line of a test of that; "" if one could."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"the test of jobs did not end in {seconds:.0f} s"
    lines = done.stderr.strip().splitlines()
    reason = lines[-1] if lines else f"the test of jobs ended with {done.returncode}"
    return reason if done.returncode else ""


def judge(
    slot: str, greeted: Path, patience: float, fault: Callable[[], str], keep: Callable[[str], None]
) -> str:
    """Keep ``slot``, which is on trial, if ``greeted`` appears in time and there is no ``fault``. Return why
    it was not kept, "" if it was.
    """
    print(f"millpond: slot {slot} is on trial until the host greets the agent, and jobs can run", flush=True)
    if not wait(greeted, patience):
        return "the host did not greet the agent"
    if reason := fault():
        return reason
    try:
        keep(slot)
    except (LocalError, OSError) as error:
        return f"it cannot be kept: {error}"
    return ""


def try_slot(slot: str) -> bool:
    """Judge ``slot``, which is on trial, and leave a report in the state; return whether it was kept."""
    _report(f"slot {slot} was restarted before its trial ended: it hung, or its power was cut")
    if reason := judge(slot, GREETED, PATIENCE_SECONDS, jobs_fault, boot_entries.make_first):
        print(f"millpond: slot {slot} is left: {reason}", flush=True)
        _report(f"slot {slot}: {reason}")
        return False
    print(f"millpond: slot {slot} is kept", flush=True)
    _report("")
    return True


def _report(text: str) -> None:
    """Leave ``text`` to the slot that comes next. A state that cannot be written changes no judgement."""
    try:
        boot_entries.REPORT.write_text(text)
    except OSError as error:
        print(f"millpond: the trial's report cannot be written: {error}", flush=True)


def main() -> int:
    """Judge a trial slot. Exit codes: 0 no trial, or kept; 1 the machine restarts, as its unit has it do."""
    try:
        slot = boot_entries.running_slot()
        trial = known_trial(slot, ASK_SECONDS)
    except (LocalError, OSError) as error:
        print(f"millpond: whether this slot is on trial is unknown: {error}", flush=True)
        return 0
    if not trial:
        if report := boot_entries.trial_report():
            print(f"millpond: the last trial failed: {report}", flush=True)
        return 0
    if try_slot(slot):
        return 0
    subprocess.run(["/usr/bin/systemctl", "reboot"], check=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
