# SPDX-License-Identifier: Apache-2.0
"""The commands of tunnel/README.md work as they are printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "tunnel" / "README.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_two_endpoints_join_two_namespaces(tun_works: None, tmp_path: Path) -> None:
    (commands,) = COMMANDS.findall(README.read_text())
    process = subprocess.Popen(
        ["bash", "-euc", commands.replace("/tmp/", f"{tmp_path}/")],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=60)
    finally:  # commands that fail leave what they have started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors
    assert '"state": "up"' in output and '"peer": "csd0"' in output
    assert output.endswith("200\n")
