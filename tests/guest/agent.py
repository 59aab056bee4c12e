# SPDX-License-Identifier: Apache-2.0
"""Entry: runs programs for the peer at the guest's port; as the guest's process 1 it first sets the guest up.

Frames both ways: size of the payload u32, number of the program u32, kind u8 (see frames.py), payload.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from frames import Decoder, Kind, encode

PORT_NAME = "millpond.agent"
MOUNTS = (
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("tmpfs", "/run", "run"),
    ("tmpfs", "/tmp", "tmp"),
    ("devpts", "/dev/pts", "pts"),
    ("tmpfs", "/dev/shm", "shm"),
)
MODULES = ("virtio_console", "virtio_net", "tun")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PORT_SECONDS = 30.0
_CHUNK = 1 << 16


class Task:
    """A program that was asked for: first what it will read, then the running process."""

    def __init__(self) -> None:
        self.given = os.memfd_create("input")
        self.pid = 0
        self.streams: set[int] = set()
        self.code: int | None = None


class Agent:
    """Serves one port for as long as the guest lives."""

    def __init__(self, port: int, children: int) -> None:
        self._port, self._children = port, children
        self._decoder = Decoder()
        self._tasks: dict[int, Task] = {}
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(port, self._read_port)
        self._watch(children, self._reap)

    def run(self) -> None:
        """Never returns."""
        self._send(Kind.READY, 0, b"")
        while True:
            for descriptor, _ in self._poll.poll():
                if handler := self._handlers.get(descriptor):
                    handler()

    def _watch(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.POLLIN)

    def _send(self, kind: Kind, number: int, payload: bytes) -> None:
        left = memoryview(encode(kind, number, payload))
        while left:
            left = left[os.write(self._port, left) :]

    def _read_port(self) -> None:
        for kind, number, payload in self._decoder.feed(os.read(self._port, _CHUNK)):
            if kind is Kind.INPUT:
                os.write(self._tasks.setdefault(number, Task()).given, payload)
            elif kind is Kind.START:
                self._start(number, self._tasks.setdefault(number, Task()), json.loads(payload))
            elif kind is Kind.SIGNAL and (task := self._tasks.get(number)) and task.code is None:
                wanted = int(payload)
                (os.kill if wanted > 0 else os.killpg)(task.pid, abs(wanted))

    def _start(self, number: int, task: Task, wish: dict[str, object]) -> None:
        os.lseek(task.given, 0, os.SEEK_SET)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
        actions = [(os.POSIX_SPAWN_DUP2, task.given, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, pipe[1], place) for place, pipe in enumerate(pipes, start=1)]
        argv, environment = wish["argv"], {**os.environ, **wish["environment"]}
        try:
            task.pid = os.posix_spawnp(
                argv[0], argv, environment, file_actions=actions, setsid=True, setsigmask=()
            )
        except OSError as error:
            os.write(pipes[1][1], f"{argv[0]}: {error.strerror}\n".encode())
            task.code = 127
        os.close(task.given)
        for kind, (reader, writer) in zip((Kind.OUTPUT, Kind.ERRORS), pipes, strict=True):
            os.close(writer)
            task.streams.add(reader)
            self._watch(reader, lambda kind=kind, reader=reader: self._forward(kind, number, task, reader))

    def _forward(self, kind: Kind, number: int, task: Task, stream: int) -> None:
        if data := os.read(stream, _CHUNK):
            self._send(kind, number, data)
            return
        self._poll.unregister(stream)
        del self._handlers[stream]
        task.streams.remove(stream)
        os.close(stream)
        self._send_exit(number, task)

    def _reap(self) -> None:
        os.read(self._children, _CHUNK)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for number, task in list(self._tasks.items()):
                if task.pid == pid:
                    task.code = os.waitstatus_to_exitcode(status)
                    self._send_exit(number, task)

    def _send_exit(self, number: int, task: Task) -> None:
        """Once it is dead and its output, unless a child of its own still holds that, is at its end."""
        if task.code is None:
            return
        if task.streams and select.select(list(task.streams), (), (), 0)[0]:
            return
        if self._tasks.pop(number, None):
            self._send(Kind.EXIT, number, str(task.code).encode())


def prepare() -> None:
    """Mounts, modules, the loopback interface and, if there is one, the interface to QEMU's own network."""
    for kind, place, name in MOUNTS:
        Path(place).mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", kind, name, place], check=True)
    subprocess.run(["modprobe", "-a", *MODULES], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if Path("/sys/class/net/eth0").exists():
        subprocess.run(["ip", "address", "add", "10.0.2.15/24", "dev", "eth0"], check=True)
        subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
        subprocess.run(["ip", "route", "add", "default", "via", "10.0.2.2"], check=True)


def open_port() -> int:
    """The virtio-serial port, by its name, which it gets a moment after its driver: there is no udev."""
    deadline = time.monotonic() + PORT_SECONDS
    while time.monotonic() < deadline:
        for port in Path("/sys/class/virtio-ports").iterdir():
            if (port / "name").exists() and (port / "name").read_text().strip() == PORT_NAME:
                return os.open(f"/dev/{port.name}", os.O_RDWR | os.O_CLOEXEC)
        time.sleep(0.1)
    raise FileNotFoundError(PORT_NAME)


def watch_children() -> int:
    """A descriptor that is readable when a child has ended."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def main() -> None:
    """Never returns; if process 1 fails, the kernel panics and QEMU ends."""
    os.environ.update(PATH=PATH, HOME="/root", LC_ALL="C.UTF-8")
    if os.getpid() == 1:
        prepare()
    Agent(open_port(), watch_children()).run()


if __name__ == "__main__":
    main()
