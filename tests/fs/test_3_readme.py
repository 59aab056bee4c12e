# SPDX-License-Identifier: Apache-2.0
"""The commands of fs/README.md work as they are printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from ..waiting import eventually
from .conftest import InNamespace

README = Path(__file__).parents[2] / "fs" / "README.md"
COMMANDS = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_a_folder_becomes_a_volume(fuse_usable: None, in_namespace: InNamespace, tmp_path: Path) -> None:
    (commands,) = COMMANDS.findall(README.read_text())
    argv = ["bash", "-euc", commands.replace("/tmp/", f"{tmp_path}/")]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    volume, backing = tmp_path / "csd0", tmp_path / "backing"

    def follow() -> None:
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout and process.stdout.readline().startswith(b"ready")
            for part in ("public", "private"):
                (volume / part / "f").write_text(part)
                assert (backing / part / "f").read_text() == part
            os.killpg(process.pid, signal.SIGINT)
        eventually(lambda: not (volume / "public").is_mount(), "the volume is unmounted")

    in_namespace(follow)
