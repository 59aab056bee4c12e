# SPDX-License-Identifier: Apache-2.0
"""Edge: imports the modules that a zygote's forks share."""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from millpond.linux.confinement.sandbox import Sandbox, enter, python_binds, system_binds
from millpond.linux.malloc import trim_heap

END_SECONDS = 10.0
"""An ended thread is gone from /proc when the kernel finds time for it."""


def load(modules: list[str]) -> str:
    """Import modules. Returns why a process that has imported them must not be forked; "" if it may."""
    failed: list[str] = []
    thread = threading.Thread(target=_import, args=(modules, failed))
    thread.start()
    thread.join()
    if failed:
        return failed[0]
    _wait_until(lambda: thread.native_id not in _threads())  # joined is not ended
    if not (pid := os.fork()):  # OpenBLAS ends its threads before a fork; a fork that needs some starts them
        os._exit(0)
    os.waitpid(pid, 0)
    trim_heap()
    gc.freeze()  # or collections in forks would write to what they share
    _wait_until(lambda: len(_threads()) == 1)
    return "" if len(_threads()) == 1 else f"{len(_threads()) - 1} threads stay"


def _import(modules: list[str], failed: list[str]) -> None:
    """Import in a thread that is alone in a sandbox: modules see a fork's files, and leave none behind."""

    def body() -> int:
        for name in modules:
            importlib.import_module(name)
        return 0

    sandbox = Sandbox(binds=(*system_binds(), *python_binds()), own_network=True, capabilities=False)
    try:
        enter(sandbox, body) if os.geteuid() == 0 else body()  # a thread cannot enter a user namespace
    except Exception as error:  # noqa: BLE001 - a fork that needs them says the same
        failed.append(repr(error))


def _threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
