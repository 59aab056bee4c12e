# SPDX-License-Identifier: Apache-2.0
"""Free heap memory is returned to the kernel."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os
from pathlib import Path
from millpond.linux.malloc import trim_heap

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])

blocks = [bytes(range(256)) * 32 for _ in range(2000)]  # 16 MB in blocks of the heap
last = bytes(20000)  # above them
blocks.clear()
before = resident()
trim_heap()
print((before - resident()) * os.sysconf("SC_PAGESIZE") > 8 << 20)
"""


def test_what_is_free_goes_back_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
