# SPDX-License-Identifier: Apache-2.0
"""Control groups of jobs under cgroup v2, as systemd delegates them to the agent's unit on a board."""

from __future__ import annotations

import pytest

from .guest import Guest

PROGRAM = """
import os, site, subprocess
from pathlib import Path

os.chdir("/tmp")  # in / the directory /millpond would be a part of the package
# A zygote is isolated: it does not read PYTHONPATH.
paths = Path(site.getsitepackages()[0], "under-test.pth")
paths.parent.mkdir(parents=True, exist_ok=True)
paths.write_text(os.environ["PYTHONPATH"].replace(":", "\\n"))
top = Path("/sys/fs/cgroup")
if not (top / "cgroup.controllers").exists():
    top.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "cgroup2", "none", str(top)], check=True)
(top / "cgroup.subtree_control").write_text("+memory +pids")
own = top / "unit"
own.mkdir()
(own / "cgroup.procs").write_text("0")

from millpond.agent.confined_script import expect_exit
from millpond.base.errors import Refused
from millpond.launch.process import LaunchedScript
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.limits.process_limits import ProcessLimits
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import Launch

zygote = Zygote("millpond.launch.entry", idle=600.0, limits=ProcessLimits.here(100 << 20, 30))
packages = (Bind(Path(path), Path(path)) for path in os.environ["PYTHONPATH"].split(":"))
binds = (*system_binds(), *python_binds(), *packages)
sandbox = Sandbox(binds=binds, own_network=True, own_pids=True, uid=64002)

def script(code):
    launch = Launch("a.py", (), {"a.py": code.encode()}, 0, 1, "127.0.0.1", 40000, "127.0.0.1", 0)
    return LaunchedScript(zygote, sandbox, launch, "")

def end_of(code):
    found = script(code)
    b"".join(iter(found.read, b""))
    try:
        return expect_exit(found).error
    except Refused as error:
        return error.text
    finally:
        found.stop()

other = script("import time\\nprint('begun', flush=True)\\ntime.sleep(600)")
print(other.read().decode().strip())
print(end_of("held = []\\nwhile len(held) < 200:\\n    held.append(b'1' * (8 << 20))"))
print(end_of("import os, time\\nfor _ in range(100):\\n    if not os.fork(): time.sleep(600)"))
print("other:", repr(str(other.shortage())))
other.stop()
print("left:", [path.name for path in (own / "jobs").iterdir() if path.is_dir()])
print("agent:", str(os.getpid()) in (own / "agent/cgroup.procs").read_text().split())
zygote.close()
paths.unlink()
"""


@pytest.mark.timeout(300)
def test_under_cgroup_v2_a_script_that_takes_too_much_ends_alone(guest: Guest) -> None:
    found = guest.python(PROGRAM, seconds=200).splitlines()
    assert found == [
        "begun",
        "out of memory: the process took more than it may",
        "a process or thread was refused before, as it had as many as it may",
        "other: ''",
        "left: []",
        "agent: True",
    ]
