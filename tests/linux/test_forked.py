# SPDX-License-Identifier: Apache-2.0
"""Programs that are forks: they are as programs of their own, and know nothing of their parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_SHOWN = """
import json, logging, os, signal, sys

def main(arguments):
    names = os.listdir("/proc/self/fd")
    shown = {
        "arguments": [sys.argv[1:], arguments],
        "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:4],
        "environment": os.environ.get("TOLD", "") + os.environ.get("PARENT", ""),
        "descriptors": sorted(int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")),
        "signals": [str(signal.getsignal(signal.SIGTERM)), len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))],
        "handlers": len(logging.root.handlers),
        "pid": os.getpid(),
    }
    if arguments[1:]:
        os.write(int(arguments[1]), b"passed")
    print(json.dumps(shown))
    sys.exit(7)
"""
_PARENT = """
import atexit, logging, os, signal, sys, threading
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.zygote import forked
from millpond.linux.zygote.prepared import PreparedFork

os.environ["PARENT"] = "of the parent"
logging.basicConfig()
atexit.register(print, "the parent's end")
signal.signal(signal.SIGTERM, lambda *_: None)
secret = os.open("/dev/null", os.O_RDONLY)
forked.load(["shown"])
"""
_STARTED = "child = forked.start([sys.executable, '-m', 'shown', 'one'], {'TOLD': 'told'})\n"
_PREPARED = """
del os.environ["PARENT"]
prepared = PreparedFork(sandboxed=SANDBOX is not None)
threading.Thread(target=threading.Event().wait, daemon=True).start()
reader, writer = os.pipe()
child = prepared.start("shown", ["one", str(writer)], [writer], sandbox=SANDBOX)
os.close(writer)
assert os.read(reader, 100) == b"passed"
"""
_END = "code = child.wait(20)\nassert code == child.poll() == 7, code\n"


def _shown(folder: Path, *parts: str) -> dict[str, Any]:
    (folder / "shown.py").write_text(_SHOWN)
    argv = [sys.executable, "-c", "".join(parts), "x" * 200]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown, end = done.stdout.splitlines()
    assert end == "the parent's end"
    found: dict[str, Any] = json.loads(shown)
    return found


def test_a_fork_is_as_a_program_of_its_own(tmp_path: Path) -> None:
    found = _shown(tmp_path, _PARENT, _STARTED, _END)
    assert found["arguments"] == [["one"], ["one"]] and found["command"] == ["-m", "shown", "one"]
    assert found["environment"] == "told" and found["handlers"] == 0
    assert found["descriptors"] == [0, 1, 2] and found["signals"] == ["0", 0]


def test_a_prepared_fork_starts_where_there_are_threads(tmp_path: Path) -> None:
    found = _shown(tmp_path, _PARENT, "SANDBOX = None\n", _PREPARED, _END)
    assert found["arguments"][0][0] == "one" and found["environment"] == ""
    assert found["descriptors"] == [0, 1, 2, int(found["arguments"][0][1])]


def test_a_prepared_fork_can_be_the_first_of_its_sandbox(tmp_path: Path) -> None:
    sandbox = "SANDBOX = Sandbox(binds=None, own_pids=True)\n"
    found = _shown(tmp_path, _PARENT, sandbox, _PREPARED, _END)
    assert found["pid"] == 1 and found["environment"] == ""


def test_a_prepared_fork_ends_with_its_parent_and_takes_one_program(tmp_path: Path) -> None:
    again = "try:\n    prepared.start('shown', [])\n    raise SystemExit(1)\nexcept OSError:\n    pass\n"
    unused = "unused = PreparedFork()\nunused._control.close()\nassert unused._process.wait(20) == 0\n"
    _shown(tmp_path, _PARENT, unused, "SANDBOX = None\n", _PREPARED, again, _END)
