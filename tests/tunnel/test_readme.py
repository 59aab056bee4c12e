# SPDX-License-Identifier: Apache-2.0
"""The commands of tunnel/README.md work as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "tunnel" / "README.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_two_endpoints_join_two_namespaces(tun_works: None, tmp_path: Path) -> None:
    (commands,) = COMMANDS.findall(README.read_text())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands.replace("/tmp/", f"{tmp_path}/")],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert '"state": "up"' in done.stdout and '"peer": "csd0"' in done.stdout
    assert done.stdout.endswith("200\n")
