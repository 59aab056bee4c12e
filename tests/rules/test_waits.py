# SPDX-License-Identifier: Apache-2.0
"""No wait of product code for a process, an event or a queue is endless, but those that are listed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import rules
from .test_rules import ROOT, expect_none, tree

_FOREGROUND = "a command in the foreground, which Ctrl-C ends"
_DUTY = "the thread or process does nothing else: nobody waits for it without a deadline"
_TASKS = "a thread that waits for tasks of its own process, which ends it"
_ENDED = "the child is known to have ended"
_UNBORN = "the child was killed, or ends, before it has done anything that could hang"
_EMULATED = "emulation: no part of a device or of the installed daemon"
MAY_BE_ENDLESS = {
    "agent/millpond/agent/data_service/handle.py: self.process.wait()": _DUTY,
    "agent/millpond/aggregate/reduction.py: turns.get()": _TASKS,
    "fs/millpond/fs/client/callbacks.py: self._drop_queue.get()": _TASKS,
    "fs/millpond/fs/client/prefetcher.py: self._dense.get()": _TASKS,
    "fs/millpond/fs/client/write_behind.py: self._due.get()": _TASKS,
    "fs/millpond/fs/fuse/threads.py: self._traffic.wait()": _TASKS,
    "host/millpond/host/emulation/machine.py: command.wait()": _FOREGROUND,
    "host/millpond/host/emulation/machine.py: os.waitpid(pid, 0)": _FOREGROUND,
    "host/millpond/host/jobs/training/checkpoints.py: self.wait()": "a thread that writes to the host's disk",
    "host/millpond/host/cli/federation/processes.py: subprocess.run(argv, ": _FOREGROUND,
    "host/millpond/host/monitor/top/app.py: subprocess.run(command, ": "a shell, until its user leaves it",
    "host/millpond/host/remote/bundles.py: subprocess.run(argv, ": _FOREGROUND,
    "host/millpond/host/remote/run_many.py: self._queue.get()": _FOREGROUND,
    "host/millpond/host/workers/dispatcher.py: self._tasks.get()": _TASKS,
    "host/millpond/host/workers/supervisor.py: self._changed.wait()": _TASKS,
    "images/millpond/images/build/__main__.py: subprocess.run(argv, ": _FOREGROUND,
    "images/millpond/images/build/debian.py: subprocess.run(tar, ": _FOREGROUND,
    "images/millpond/images/build/run.py: subprocess.run(words, ": _FOREGROUND,
    "images/millpond/images/ondevice/bless.py: subprocess.run(['/usr/bin/systemctl', ": "the machine ends",
    "images/millpond/images/ondevice/self_test.py: subprocess.run(['/usr/bin/systemctl', ": _EMULATED,
    "images/millpond/images/ondevice/self_test.py: subprocess.run(argv, ": _EMULATED,
    "images/millpond/images/runtime/emulated_init.py: other.wait()": _EMULATED,
    "images/millpond/images/runtime/qemu.py: process.wait()": _EMULATED,
    "tunnel/millpond/linux/confinement/sandbox.py: os.waitpid(pid, 0)": _DUTY,
    "tunnel/millpond/linux/confinement/sandbox_exec.py: os.waitpid(pid, 0)": _DUTY,
    "tunnel/millpond/linux/logs.py: self._lines.get()": _TASKS,
    "tunnel/millpond/linux/pid1.py: os.waitpid(found.si_pid, 0)": _ENDED,
    "tunnel/millpond/linux/zygote/client.py: process.wait()": _DUTY,
    "tunnel/millpond/linux/zygote/preloading.py: os.waitpid(pid, 0)": _UNBORN,
    "tunnel/millpond/linux/zygote/server.py: os.waitpid(pid, 0)": _UNBORN,
    "tunnel/millpond/linux/zygote/server.py: os.waitid(os.P_PID, child.pid, ": _ENDED,
    "tunnel/millpond/linux/zygote/server.py: os.waitpid(child.pid, 0)": _ENDED,
    "tunnel/millpond/tunnel/endpoint/handle.py: process.wait()": _DUTY,
    "tunnel/millpond/tunnel/endpoint/handle.py: self._process.wait()": _DUTY,
    "tunnel/millpond/tunnel/endpoint/pumps.py: os.waitid(os.P_PID, self.pid, ": _ENDED,
    "tunnel/millpond/tunnel/endpoint/zygote.py: os.waitpid(self._children.pop(pidfd), 0)": _ENDED,
    "tunnel/millpond/tunnel/endpoint/zygote.py: os.waitpid(pid, 0)": _UNBORN,
    "tunnel/millpond/tunnel/transports/nvme/transport.py: failures.get()": _TASKS,
}
"""The begin of each call in its module, and why it may wait without a deadline."""


def test_no_wait_is_endless() -> None:
    """Before: single waits were tested, and that of the client of a zygote was none of them."""
    expect_none(rules.waits_without_a_deadline(ROOT, MAY_BE_ENDLESS))
    assert all(MAY_BE_ENDLESS.values())


@pytest.mark.parametrize(
    "wait",
    [
        "child.wait()",
        "child.communicate(b'x')",
        "subprocess.run(['true'], check=True)",
        "subprocess.check_output(['true'])",
        "os.waitpid(pid, 0)",
        "os.waitid(os.P_PID, pid, os.WEXITED)",
        "answers.get()",
    ],
)
def test_an_endless_wait_is_found_unless_excepted(tmp_path: Path, wait: str) -> None:
    root = tree(tmp_path, plan=f"import queue\nx = {wait}\n")
    place = "tunnel/millpond/base/plan.py"
    assert rules.waits_without_a_deadline(root, {}) == [f"{place}:2: {wait}: has no deadline"]
    assert rules.waits_without_a_deadline(root, {f"{place}: {wait[:8]}": "why"}) == []
    unused = f"{place}: other()"
    assert f"{unused}: no longer needs its exception" in rules.waits_without_a_deadline(root, {unused: "why"})


@pytest.mark.parametrize(
    "wait",
    [
        "child.wait(3)",
        "child.communicate(timeout=3)",
        "subprocess.run(['true'], timeout=3)",
        "os.waitpid(pid, os.WNOHANG)",
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)",
        "answers.get(timeout=3)",
        "known.get('x')",
        "current.get()",
        "wait()",
    ],
)
def test_other_waits_are_allowed(tmp_path: Path, wait: str) -> None:
    text = f"import queue\ncurrent: ContextVar[int] = ContextVar('current')\nx = {wait}\n"
    assert rules.waits_without_a_deadline(tree(tmp_path, plan=text), {}) == []
