# SPDX-License-Identifier: Apache-2.0
"""Edge: a guest, and programs in it. ``with Guest() as guest: guest.run(["uname", "-m"])``."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .frames import Decoder, Kind, encode
from .machine import Hardware, Machine
from .repository import PYTHONPATH

BOOT_SECONDS = 180.0
_CHUNK = 1 << 18
_CONSOLE_LINES = 80


class GuestFailed(Exception):
    """The guest is gone, a program failed, or something did not happen in time; the text tells how."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended: its exit code (minus the signal), what it wrote."""

    code: int
    output: bytes
    errors: bytes

    @property
    def text(self) -> str:
        """Its output without the newline at the end."""
        return self.output.decode().rstrip("\n")


class GuestProgram:
    """A program that runs in the guest; kept by :class:`Guest`, which feeds it."""

    def __init__(self, guest: Guest, number: int, argv: Sequence[str]) -> None:
        self._guest, self.number, self.argv = guest, number, list(argv)
        self._output, self._errors = bytearray(), bytearray()
        self.code: int | None = None

    def take(self, kind: Kind, payload: bytes) -> None:
        """What the guest says of it."""
        if kind is Kind.OUTPUT:
            self._output += payload
        elif kind is Kind.ERRORS:
            self._errors += payload
        elif kind is Kind.EXIT:
            self.code = int(payload)

    @property
    def lines(self) -> list[str]:
        """The whole lines that it has written so far."""
        return bytes(self._output).decode(errors="replace").split("\n")[:-1]

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return bytes(self._errors).decode(errors="replace")

    def says(self, text: str, seconds: float = 30) -> None:
        """Wait until it has written the line ``text``. Raises GuestFailed."""
        self._guest.wait(
            lambda: text in self.lines or self.code is not None, f"{self} saying {text!r}", seconds
        )
        if text not in self.lines:
            raise GuestFailed(f"{self} ended without saying {text!r}")

    def wait(self, seconds: float = 60) -> Result:
        """Its end. Raises GuestFailed if it does not come in time."""
        self._guest.wait(lambda: self.code is not None, f"the end of {self}", seconds)
        assert self.code is not None
        return Result(self.code, bytes(self._output), bytes(self._errors))

    def result(self, seconds: float = 60) -> str:
        """Its last line, once it ended with exit code 0. Raises GuestFailed."""
        if self.wait(seconds).code:
            raise GuestFailed(str(self))
        return self.lines[-1]

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._guest.send(Kind.SIGNAL, self.number, str(number).encode())

    def kill(self) -> None:
        """SIGKILL to it alone, and wait for its end."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """SIGKILL to it and its children, those apart that made a session of their own."""
        self._end(-signal.SIGKILL)

    def _end(self, number: int) -> None:
        """With the guest it has ended too."""
        try:
            if self.code is None:
                self.signal(number)
                self.wait()
        except GuestFailed:
            if not self._guest.gone:
                raise

    def __enter__(self) -> GuestProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        state = "running" if self.code is None else f"exit code {self.code}"
        said = bytes(self._output[-2000:]).decode(errors="replace")
        return f"{self.argv!r} in the guest ({state}, output {said!r}, errors {self.errors[-2000:]!r})"


class Guest:
    """Boots on construction; a context manager that always ends it. Raises GuestFailed."""

    def __init__(self, hardware: Hardware | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="millpond-guest-")
        self._changed = threading.Condition()
        self._programs: dict[int, GuestProgram] = {}
        self._ready, self.gone = False, False
        self._number = 0
        self.machine = Machine(hardware or Hardware(), Path(self._folder.name))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.wait(lambda: self._ready, "the guest's boot", BOOT_SECONDS)
        except BaseException:
            self.close()
            raise

    def start(self, argv: Sequence[str], given: bytes = b"", **environment: str) -> GuestProgram:
        """Run a program in a session of its own; it reads ``given`` from standard input."""
        with self._changed:
            self._number += 1
            program = self._programs[self._number] = GuestProgram(self, self._number, argv)
        for begin in range(0, len(given), _CHUNK):
            self.send(Kind.INPUT, program.number, given[begin : begin + _CHUNK])
        wish = {"argv": list(argv), "environment": {"PYTHONPATH": PYTHONPATH, **environment}}
        self.send(Kind.START, program.number, json.dumps(wish).encode())
        return program

    def run(
        self,
        argv: Sequence[str],
        given: bytes = b"",
        *,
        seconds: float = 60,
        check: bool = True,
        **environment: str,
    ) -> Result:
        """Run a program to its end. Raises GuestFailed for a failure of it too, unless ``check`` is False."""
        with self.start(argv, given, **environment) as program:
            result = program.wait(seconds)
            if check and result.code:
                raise GuestFailed(str(program))
        return result

    def put(self, path: str, content: bytes) -> None:
        """Write a file in the guest."""
        self.run(["dd", f"of={path}", "bs=1M", "status=none"], content)

    def get(self, path: str) -> bytes:
        """Read a file of the guest."""
        return self.run(["cat", path]).output

    def python(self, code: str, *arguments: str, seconds: float = 60) -> str:
        """Run Python code with millpond and its packages on the path; what it printed."""
        return self.run(["python3", "-c", code, *arguments], seconds=seconds).text

    def ends(self, seconds: float) -> None:
        """Wait until it has switched itself off, or would start again. Raises GuestFailed."""
        self.wait(lambda: self.gone, "its end", seconds)

    def send(self, kind: Kind, number: int, payload: bytes) -> None:
        """A frame to the guest. Raises GuestFailed."""
        try:
            self.machine.port.sendall(encode(kind, number, payload))
        except OSError:
            self.gone = True
            raise GuestFailed(self._story("the guest is gone")) from None

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Until something that the guest says makes ``condition`` true. Raises GuestFailed."""
        with self._changed:
            self._changed.wait_for(lambda: self.gone or condition(), seconds)
            if not condition():
                why = "the guest is gone" if self.gone else f"not within {seconds} s"
                raise GuestFailed(self._story(f"{what}: {why}"))

    def _read(self) -> None:
        decoder = Decoder()
        while data := self._receive():
            with self._changed:
                for kind, number, payload in decoder.feed(data):
                    self._ready |= kind is Kind.READY
                    if program := self._programs.get(number):
                        program.take(kind, payload)
                    if kind is Kind.EXIT:
                        self._programs.pop(number, None)
                self._changed.notify_all()
        with self._changed:
            self.gone = True
            self._changed.notify_all()

    def _receive(self) -> bytes:
        try:
            return self.machine.port.recv(_CHUNK)
        except OSError:
            return b""

    def _story(self, what: str) -> str:
        console = "\n".join(self.machine.console().splitlines()[-_CONSOLE_LINES:])
        return f"{what}; its console:\n{console}"

    def close(self) -> None:
        """End it."""
        self.machine.close()
        self._reader.join()
        self._folder.cleanup()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind:
            print(self._story(f"the guest when {kind.__name__} came"))
        self.close()
