# SPDX-License-Identifier: Apache-2.0
"""Signals and ends of sandboxed processes, and the descriptors that they keep."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from millpond.linux.confinement.sandbox import (
    Sandbox,
    accept_signals,
    spawn,
)
from millpond.linux.confinement.sandbox_exec import confined

from .test_sandbox import NOBODY, SOON, needs_root, wait


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


@needs_root
@pytest.mark.parametrize("own_pids", [False, True])
def test_sigterm_reaches_the_body(own_pids: bool, pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    def body() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        accept_signals()
        os.write(writing, b"ready")
        while True:  # signal.pause() would miss a signal that arrives just before it
            time.sleep(0.01)

    pid = spawn(Sandbox(own_pids=own_pids), body)
    assert os.read(reading, 5) == b"ready"
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 9


@needs_root
def test_a_signal_waits_for_the_first_process_to_be_ready(pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    def body() -> int:
        os.write(writing, b"ready")
        time.sleep(0.5)  # the signal comes now, and the kernel would forget it
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
        accept_signals()
        return 0

    pid = spawn(Sandbox(own_pids=True), body)
    assert os.read(reading, 5) == b"ready"
    os.kill(pid, signal.SIGTERM)
    assert wait(pid) == 9


def sleeper(writing: int) -> int:
    """Start a grandchild that would live for ever, say so, and wait."""
    if os.fork() == 0:
        signal.pause()
    os.write(writing, b"ready")
    signal.pause()
    return 0


def assert_all_gone(reading: int) -> None:
    """Assert that the pipe ends: every process in the sandbox held its writing end."""
    assert select.select([reading], [], [], SOON)[0]
    assert os.read(reading, 1) == b""


@needs_root
def test_everything_dies_with_the_outermost_process(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    pid = spawn(Sandbox(own_pids=True), lambda: sleeper(writing))
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert_all_gone(reading)


@needs_root
@pytest.mark.parametrize("uid", [None, NOBODY])
def test_it_dies_with_its_parent(pipe: tuple[int, int], uid: int | None) -> None:
    reading, writing = pipe
    parent = os.fork()
    if parent == 0:
        os.close(reading)
        spawn(Sandbox(own_pids=True, uid=uid), lambda: sleeper(writing))
        signal.pause()
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert_all_gone(reading)


@needs_root
def test_it_dies_with_the_thread_that_made_it() -> None:
    made: list[subprocess.Popen[bytes]] = []

    def make() -> None:
        command = confined(Sandbox(own_pids=True), ["/bin/sh", "-c", "echo ready; exec sleep 1000"])
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert made[0].stdout
        made[0].stdout.readline()  # a thread that ends before the kernel knows of it is not noticed

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with made[0] as process:
        assert process.wait(SOON) == -signal.SIGKILL


@needs_root
def test_kept_descriptors_survive_exec(pipe: tuple[int, int]) -> None:
    reading, writing = pipe

    def body() -> int:
        os.execv("/bin/sh", ["sh", "-c", f"echo kept >/proc/self/fd/{writing}"])

    pid = spawn(Sandbox(), body, keep=[writing])
    assert wait(pid) == 0
    assert os.read(reading, 10) == b"kept\n"
    assert wait(spawn(Sandbox(), body)) != 0
