# SPDX-License-Identifier: Apache-2.0
"""The guest that other tests rely on: programs, files, network, and shutdown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from ..waiting import eventually
from .guest import Guest, GuestFailed
from .repository import ROOT

pytestmark = pytest.mark.timeout(240)

SECRET = b"from the machine around the guest"
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())"
OWNER = """
import sys, time
from tests.guest.guest import Guest
guest = Guest()
print(guest.machine.process.pid, flush=True)
time.sleep(600)
"""


def test_a_program_runs_and_its_streams_are_told_apart(guest: Guest) -> None:
    result = guest.run(["sh", "-c", "echo out; echo err >&2; exit 7"], check=False)
    assert (result.code, result.output, result.errors) == (7, b"out\n", b"err\n")
    assert guest.run(["uname", "-m"]).text == "x86_64"


def test_a_failed_program_shows_what_it_said(guest: Guest) -> None:
    with pytest.raises(GuestFailed, match=r"exit code 3.*too bad"):
        guest.run(["sh", "-c", "echo too bad >&2; exit 3"])
    assert guest.run(["no-such-program"], check=False).code == 127


def test_files_cross_unchanged(guest: Guest) -> None:
    content = os.urandom(3_000_001)
    guest.put("/tmp/content", content)
    assert guest.get("/tmp/content") == content


def test_a_program_in_the_background(guest: Guest) -> None:
    with guest.start(["sh", "-c", "sleep 600 & echo began; wait"]) as program:
        program.says("began")
        child = guest.run(["pgrep", "-x", "sleep"]).text
        program.kill()
        assert program.code == -signal.SIGKILL
        assert guest.run(["kill", child]).code == 0
    with guest.start(["sh", "-c", "sleep 601; true"]) as program:
        pass
    assert guest.run(["pgrep", "-f", "sleep 601"], check=False).code == 1


def test_the_working_tree_runs_there(guest: Guest) -> None:
    assert "usage" in guest.run(["python3", "-m", "millpond.tunnel", "--help"]).text
    guest.python("import msgpack, psutil, pyroute2")


def test_it_reaches_this_machine(guest: Guest) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SECRET)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://10.0.2.2:{server.server_port}/"
        said = guest.python(FETCH, url)
        thread.join()
    assert said == SECRET.decode()


def test_it_has_what_the_transports_need(guest: Guest) -> None:
    guest.run(["modprobe", "-a", "nvme-tcp", "nvme-fabrics", "vfio-pci"])
    assert guest.run(["test", "-c", "/dev/net/tun"]).code == 0
    assert int(guest.run(["sh", "-c", "ls /sys/kernel/iommu_groups | wc -l"]).text) > 0
    guest.run(["nvme", "version"])
    guest.run(["mke2fs", "-V"])


def test_a_guest_that_dies_is_told_with_its_console(guest_works: None) -> None:
    with Guest() as guest, guest.start(["sleep", "600"]) as program:
        guest.run(["sh", "-c", "echo 'last words' >/dev/console; sync"])
        guest.start(["sh", "-c", "echo c >/proc/sysrq-trigger"])
        with pytest.raises(GuestFailed, match=r"(?s)the guest is gone.*last words.*sysrq triggered crash"):
            program.wait()


def test_it_ends_with_the_process_that_started_it(guest_works: None, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-c", OWNER]
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        qemu = psutil.Process(int(owner.stdout.readline()))
        assert qemu.name().startswith("qemu")
        owner.kill()
    eventually(lambda: not _lives(qemu), "the end of QEMU, with its owner")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
