# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a host and an agent about a launched script (over a control connection)."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.base.errors import ConfigError
from millpond.wire.messages import Kind, Message, message

MOST_CODE = 3 << 20
"""Most bytes of all files of a script: they are sent in the head of one message."""
LONGEST_LINE = 4096
"""Most characters of a line of output; longer ones are cut into several."""

MOST_AT_ONCE = 1 << 16
"""Most characters of all lines of one Output, line ends counted."""


@message("launch")
@dataclass(frozen=True, slots=True)
class Launch(Message):
    """Run ``script``, one of ``files``, as worker ``rank`` of ``world_size`` that meet at the master's port.

    Answered by any number of Outputs, and at last by Exited. The script runs for as long as this connection
    is open.
    """

    script: str
    arguments: tuple[str, ...]
    files: dict[str, bytes]
    rank: int
    world_size: int
    master_address: str
    master_port: int


@message("launch.output", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class Output(Message):
    """Lines that the script printed."""

    lines: tuple[str, ...]


@message("launch.exited", Kind.LAUNCHED)
@dataclass(frozen=True, slots=True)
class Exited(Message):
    """The script has ended: its exit code, 128 + N if signal N ended it."""

    code: int


def check_files(script: str, files: dict[str, bytes]) -> None:
    """Check the files of a script. Raises ConfigError for names that are no plain file names, and for too
    many bytes.
    """
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ConfigError(f"'{name:.80}' is no name of a file")
    if script not in files:
        raise ConfigError(f"the script '{script:.80}' is not among its files")
    total = sum(map(len, files.values()))
    if total > MOST_CODE:
        raise ConfigError(
            f"the script's files have {total / 1e6:.1f} MB; {MOST_CODE >> 20} MiB are possible: put data into"
            " the public part of the devices' volumes",
        )


def environment(launch: Launch, interface: str) -> dict[str, str]:
    """Return the variables that torchrun gives a worker; ``interface`` is the one that leads
    to the others.
    """
    return {
        "RANK": str(launch.rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(launch.rank),
        "MASTER_ADDR": launch.master_address,
        "MASTER_PORT": str(launch.master_port),
        "GLOO_SOCKET_IFNAME": interface,
    }


class Lines:
    """Splits a stream of bytes into lines. Bytes that are not UTF-8 are replaced."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> tuple[str, ...]:
        """Return the lines that ``data`` completes; a carriage return, as of a progress bar, ends one too."""
        *whole, self._rest = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        while len(self._rest) >= LONGEST_LINE:
            whole.append(self._rest[:LONGEST_LINE])
            self._rest = self._rest[LONGEST_LINE:]
        return tuple(part for line in whole for part in _parts(line))

    def end(self) -> tuple[str, ...]:
        """Return the last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return tuple(_parts(rest)) if rest else ()


def _parts(line: bytes) -> list[str]:
    text = line.decode(errors="replace")
    return [text[at : at + LONGEST_LINE] for at in range(0, max(len(text), 1), LONGEST_LINE)]
