# SPDX-License-Identifier: Apache-2.0
"""Pure: assemble seccomp programs that allow named system calls, and ioctl for numbered requests, and answer
EPERM to all others; or that deny named ones alone.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NUMBERS: dict[str, tuple[int, int | None]] = {  # x86_64, aarch64
    "add_key": (248, 217),
    "brk": (12, 214),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "clone3": (435, 435),
    "close": (3, 57),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fcntl": (72, 25),
    "futex": (202, 98),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "gettid": (186, 178),
    "ioctl": (16, 29),
    "keyctl": (250, 219),
    "madvise": (28, 233),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "poll": (7, None),
    "ppoll": (271, 73),
    "read": (0, 63),
    "readv": (19, 65),
    "request_key": (249, 218),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "write": (1, 64),
    "writev": (20, 66),
}

INTERPRETER = frozenset(
    [
        "brk",
        "clock_gettime",  # by the vDSO where it cannot read the clock: waits for the GIL need it
        "close",
        "exit",
        "exit_group",
        "futex",
        "getpid",
        "getrandom",
        "gettid",
        "madvise",
        "mmap",
        "mprotect",
        "mremap",
        "munmap",
        "restart_syscall",
        "rt_sigaction",
        "rt_sigprocmask",
        "rt_sigreturn",
        "sched_yield",
    ]
)
"""System calls that CPython needs to run on descriptors that are open."""
THREADS = frozenset(["clone", "clone3", "rseq", "sched_getaffinity", "set_robust_list"])
"""System calls that CPython needs besides to start threads."""

KEYRINGS = frozenset(["add_key", "keyctl", "request_key"])
"""System calls of the kernel's keyrings, which a user's processes share, and which last longer than these."""

_LOAD, _JUMP_IF_EQUAL, _JUMP_UNLESS_BELOW, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCH_OFFSET, _SECOND_ARGUMENT_OFFSET = 0, 4, 24
"""Offsets in ``struct seccomp_data``; of an argument the lower half, on little-endian processors."""
_INSTRUCTION = struct.Struct("=HBBI")
_Step = tuple[int, int, int, int]
_X32 = 1 << 30
"""The bit by which x86_64 has each call a second time."""


def known(machine: str) -> bool:
    """Whether there are programs for a processor, as ``os.uname().machine`` names it."""
    return machine in _AUDIT_ARCH


def program(machine: str, calls: Iterable[str], requests: Iterable[int] = ()) -> bytes:
    """Assemble the program for a processor. ``requests`` are the requests of ioctl(2) that are allowed, of
    which the kernel takes 32 bits. Raises KeyError for a call or processor that is not known here, ValueError
    for ioctl without requests.
    """
    calls = set(calls)
    if "ioctl" in calls:
        raise ValueError("ioctl is allowed by its requests alone")
    steps = _numbered(machine, calls, _ALLOW)
    steps += _requests(_NUMBERS["ioctl"][_column(machine)], sorted(set(requests)))
    steps.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return _packed(steps)


def denying(machine: str, calls: Iterable[str]) -> bytes:
    """Assemble the program for a processor that answers EPERM to these calls, and allows all others. Raises
    KeyError for a call or processor that is not known here.
    """
    denied = _ERRNO | errno.EPERM
    steps = _numbered(machine, calls, denied)
    steps += [(_JUMP_UNLESS_BELOW, 1, 0, _X32), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, denied)]
    return _packed(steps)


def _column(machine: str) -> int:
    return list(_AUDIT_ARCH).index(machine)


def _packed(steps: Iterable[_Step]) -> bytes:
    return b"".join(_INSTRUCTION.pack(*step) for step in steps)


def _numbered(machine: str, calls: Iterable[str], answer: int) -> list[_Step]:
    """Return the steps that give this answer to calls, and go on with the number of any other."""
    column = _column(machine)
    steps = [
        (_LOAD, 0, 0, _ARCH_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # 32-bit calls have other numbers
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    for number in sorted({number for call in calls if (number := _NUMBERS[call][column]) is not None}):
        steps += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    return steps


def _requests(ioctl: int | None, requests: Sequence[int]) -> list[_Step]:
    """Return the steps that allow ioctl for these requests; another call passes over them."""
    if ioctl is None or not requests:
        return []
    steps = [(_LOAD, 0, 0, _SECOND_ARGUMENT_OFFSET)]
    for request in requests:
        steps += [(_JUMP_IF_EQUAL, 0, 1, request), (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_IF_EQUAL, 0, len(steps), ioctl), *steps]
