"""What the processes of an end may do: little, and the pumps next to nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from millpond.linux.confinement import seccomp
from millpond.linux.syscalls import filter_system_calls, no_new_privileges
from millpond.tunnel.datapath.confinement import PACKETS

from .conftest import eventually

CAP_NET_ADMIN = 1 << 12


def fields(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_an_end_keeps_one_capability_and_its_pumps_none(pair: Any) -> None:
    for end in pair.start():
        kept = fields(end.process.pid)
        assert int(kept["CapEff"], 16) == int(kept["CapPrm"], 16) == CAP_NET_ADMIN
        assert kept["NoNewPrivs"] == "1"
        assert len(end.pumps()) == 2
        for pump in end.pumps():
            eventually(lambda pump=pump: fields(pump)["Seccomp"] == "2", "the pump is confined")
            left = fields(pump)
            assert int(left["CapEff"], 16) == int(left["CapPrm"], 16) == 0
            assert left["NoNewPrivs"] == "1"


def in_a_child(calls: frozenset[str], action: Any) -> int:
    """The errno of ``action`` in a process that may make ``calls``, 0 for none, 255 for anything else."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 255
    try:
        no_new_privileges()
        filter_system_calls(seccomp.program(os.uname().machine, seccomp.INTERPRETER | calls))
        action()
        code = 0
    except OSError as error:
        code = error.errno or 255
    finally:
        os._exit(code)


@pytest.mark.skipif(not seccomp.known(os.uname().machine), reason="no filter for this processor")
@pytest.mark.parametrize(
    "action",
    [
        lambda: os.close(os.open("/dev/null", os.O_RDONLY)),
        lambda: socket.socket().close(),
        lambda: os._exit(0) if os.fork() == 0 else None,
        lambda: os.execv("/bin/true", ["true"]),
        lambda: os.kill(os.getppid(), 0),
        lambda: Path("/proc/self/exe").readlink(),
        lambda: os.pipe(),
        lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()),
    ],
)
def test_a_pump_can_neither_open_nor_start_nor_reach_anything(action: Any) -> None:
    assert in_a_child(PACKETS, action) == errno.EPERM


def test_a_pump_can_carry_packets() -> None:
    reader, writer = os.pipe()
    try:
        assert in_a_child(PACKETS, lambda: os.writev(writer, (b"packet", b"s"))) == 0
        assert os.read(reader, 100) == b"packets"
        assert in_a_child(PACKETS - {"writev"}, lambda: os.writev(writer, (b"x",))) == errno.EPERM
    finally:
        os.close(reader)
        os.close(writer)


def test_programs_are_made_of_whole_instructions_for_each_processor() -> None:
    for machine in ("x86_64", "aarch64"):
        assert len(seccomp.program(machine, seccomp.INTERPRETER | PACKETS | seccomp.THREADS)) % 8 == 0
    assert not seccomp.known("riscv64")
