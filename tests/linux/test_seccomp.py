# SPDX-License-Identifier: Apache-2.0
"""System calls: those that a filter allows, and a child that ends with its parent."""

from __future__ import annotations

import errno
import os
import select
import signal
import struct
import subprocess
import sys

import pytest

from millpond.linux.confinement import seccomp

LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
CALLS = ("read", "write", "epoll_pwait", "exit_group")
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS = {"x86_64": {0, 1, 281, 231}, "aarch64": {63, 64, 22, 94}}


def outcome(program: bytes, architecture: int, number: int, second: int = 0) -> int:
    """What a program returns for a system call with that second argument."""
    steps = list(struct.iter_unpack("=HBBI", program))
    word, at = 0, 0
    while True:
        code, if_equal, if_not, value = steps[at]
        at += 1
        if code == LOAD:
            word = {0: number, 4: architecture, 24: second}[value]
        elif code == JUMP_IF_EQUAL:
            at += if_equal if word == value else if_not
        else:
            assert code == RETURN
            return int(value)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_named_is_allowed_and_nothing_else(machine: str) -> None:
    program = seccomp.program(machine, CALLS)
    allowed = {number for number in range(600) if outcome(program, ARCHITECTURES[machine], number) == ALLOWED}
    assert allowed == NUMBERS[machine]
    assert outcome(program, ARCHITECTURES[machine], 599) == REFUSED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    program, other = seccomp.program(machine, CALLS), 0x40000003  # 32-bit x86
    assert {outcome(program, other, number) for number in range(600)} == {KILLED}


def test_a_call_that_a_processor_does_not_have_is_left_out() -> None:
    assert len(seccomp.program("aarch64", ["read", "poll"])) == len(seccomp.program("aarch64", ["read"]))


def test_other_processors_are_not_known() -> None:
    assert seccomp.known("x86_64") and seccomp.known("aarch64") and not seccomp.known("riscv64")
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.program("riscv64", CALLS)
    with pytest.raises(KeyError):
        seccomp.program("x86_64", ["teleport"])


@pytest.mark.parametrize(("machine", "ioctl", "write"), [("x86_64", 16, 1), ("aarch64", 29, 64)])
def test_ioctl_is_allowed_for_the_named_requests(machine: str, ioctl: int, write: int) -> None:
    program, architecture = seccomp.program(machine, CALLS, (77, 0xC0504E48)), ARCHITECTURES[machine]
    assert outcome(program, architecture, ioctl, 77) == ALLOWED
    assert outcome(program, architecture, ioctl, 0xC0504E48) == ALLOWED
    assert outcome(program, architecture, ioctl, 78) == outcome(program, architecture, 599, 77) == REFUSED
    assert outcome(program, architecture, write, 78) == ALLOWED
    assert outcome(seccomp.program(machine, CALLS), architecture, ioctl, 77) == REFUSED
    with pytest.raises(ValueError, match="by its requests alone"):
        seccomp.program(machine, ["ioctl"])


STARTS = """
import subprocess, sys
from millpond.linux.syscalls import killed_with_parent
print(subprocess.Popen(["sleep", "60"], preexec_fn=killed_with_parent()).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kill", [True, False])
def test_a_child_is_killed_when_its_parent_ends(kill: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin and parent.stdout
        child = os.pidfd_open(int(parent.stdout.readline()))
        assert not select.select([child], [], [], 0.2)[0]
        if kill:
            parent.kill()
        parent.stdin.close()
        ended = select.select([child], [], [], 20)[0]
    if not ended:
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)
    assert ended
