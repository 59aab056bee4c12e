# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that a user without any privilege makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandbox_exec import confined

SOON = 30.0
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and uids of this machine")


UNPRIVILEGED = """
import json, os, socket, sys
from pathlib import Path
from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import Bind, Sandbox, exit_code, has_many_uids, spawn

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(field + ":"))

def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return type(error).__name__
    return "nothing"

def run(sandbox, body):
    reading, writing = os.pipe()
    def inside():
        os.write(writing, json.dumps(body()).encode())
        return 0
    pid = spawn(sandbox, inside)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    code = exit_code(os.waitpid(pid, 0)[1])
    return json.loads(data) if code == 0 else f"exit code {code}"

def capabilities():
    return int(status("CapEff"), 16)

folder = Path(sys.argv[1])
report = {}
report["root"] = run(Sandbox(), lambda: [os.getuid(), capabilities() != 0])
report["network"] = run(Sandbox(own_network=True), lambda: [name for _, name in socket.if_nameindex()])
report["pids"] = run(Sandbox(own_pids=True), lambda: [os.getpid(), os.listdir("/proc").count("2")])
shown = Sandbox(binds=(Bind(folder, Path("/shown")),), hostname="csd1", own_network=True, own_pids=True)
report["shown"] = run(shown, lambda: [
    sorted(os.listdir("/")), Path("/shown/data").read_text(), os.uname().nodename,
    fails(Path("/shown/new").write_text, "x"),
])
renamed = Sandbox(binds=shown.binds, own_pids=True, uid=1234)
report["renamed"] = run(renamed, lambda: [
    os.getuid(), capabilities(), status("NoNewPrivs"), has_many_uids(),
    fails(syscalls.mount, "tmpfs", Path("/shown"), "tmpfs"), Path("/shown/data").read_text(),
])
unlinked = Sandbox(binds=(Bind(folder, Path("/shown"), follow_links=False),), own_pids=True, uid=1234)
report["unlinked"] = run(unlinked, lambda: [
    fails(Path("/shown/link").read_text), Path("/shown/data").read_text()
])
# A board, and in it the sandbox of a worker.
report["nested"] = run(shown, lambda: run(
    Sandbox(binds=(Bind(Path("/shown/data"), Path("/deep")),), own_pids=True, uid=64002),
    lambda: [os.getuid(), capabilities(), Path("/deep").read_text(), Path("/shown").exists()],
))
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def unprivileged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("unprivileged")
    (folder / "data").write_text("seen")
    (folder / "link").symlink_to("data")
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    if as_nobody(["unshare", "--user", "--map-root-user", "true"], folder).returncode:
        pytest.skip("user namespaces are off on this machine")
    done = as_nobody([sys.executable, "-c", UNPRIVILEGED, str(folder)], folder)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert isinstance(report, dict)
    return report


def as_nobody(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as an ordinary user; as root, where nobody may reach Python."""
    if os.geteuid() == 0:
        binds = (*system_binds(), *python_binds(), Bind(folder, folder, read_only=False))
        command = confined(Sandbox(binds=binds, uid=NOBODY), command)
    return subprocess.run(command, capture_output=True, text=True, timeout=SOON, cwd="/")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("root", [0, True]),
        ("network", ["lo"]),
        ("pids", [1, 0]),
        ("shown", [["dev", "proc", "shown", "sys", "tmp"], "seen", "csd1", "OSError"]),
        ("renamed", [1234, 0, "1", False, "PermissionError", "seen"]),
        ("unlinked", ["OSError", "seen"]),
        ("nested", [64002, 0, "seen", False]),
    ],
)
def test_without_privilege(unprivileged: dict[str, object], part: str, expected: object) -> None:
    assert unprivileged[part] == expected
