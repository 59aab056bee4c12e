"""Whether a tree of processes does anything."""

from __future__ import annotations

import subprocess
import sys
import time

from millpond.linux.progress import processor_time

BUSY = "while True: pass"
SLEEPING = "import time; time.sleep(100)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def advanced(program: str) -> bool:
    """Whether a child of a process that waits for it does anything, once it has started."""
    with subprocess.Popen([sys.executable, "-c", PARENT, program]) as process:
        try:
            time.sleep(0.7)
            before = processor_time(process.pid)
            time.sleep(0.5)
            after = processor_time(process.pid)
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
            process.kill()
    assert before is not None and after is not None
    return after > before


def test_a_busy_child_makes_progress() -> None:
    assert advanced(BUSY)


def test_a_sleeping_child_makes_none() -> None:
    assert not advanced(SLEEPING)


def test_nothing_is_known_of_nobody() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert processor_time(process.pid) is None
