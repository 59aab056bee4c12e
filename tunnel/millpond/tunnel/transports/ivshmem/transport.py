"""Edge: the transport into a virtual machine, for the host's end outside and the device's end inside."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from millpond.base.errors import LocalError, RemoteError
from millpond.tunnel.ring.layout import Layout
from millpond.tunnel.transports.ivshmem.connection import IvshmemConnection
from millpond.tunnel.transports.ivshmem.device_protocol import IvshmemDevice
from millpond.tunnel.transports.ivshmem.device_side import DeviceConnection
from millpond.tunnel.transports.ivshmem.doorbell_client import DoorbellClient
from millpond.tunnel.transports.ivshmem.host_side import HostConnection
from millpond.tunnel.transports.ivshmem.sysfs import open_board

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class IvshmemTransport:
    """One end at ``where``: the path of a doorbell server's socket, a PCI address such as 0000:00:05.0, or
    ``pci`` for the only ivshmem device of this machine. Raises LocalError.
    """

    def __init__(self, role: str, where: str, entries: int) -> None:
        self._role, self._where, self._layout = role, where, Layout(entries)
        self._board: IvshmemDevice | None = None
        self._open: Callable[[], IvshmemDevice] = lambda: DoorbellClient(Path(where).absolute(), role)
        if where == "pci" or _PCI_ADDRESS.fullmatch(where):
            if role == "host":
                raise LocalError("the host's end is outside of the virtual machine, at the doorbell server")
            self._open = lambda: open_board("" if where == "pci" else where)
            self._board = self._checked(self._open())

    def readiness(self) -> int | None:
        """Nothing tells that a peer knocks; a connection waits for one itself."""
        return None

    def join(self) -> IvshmemConnection:
        """A link to be opened with whoever is the peer then. Raises RemoteError, OSError, LocalError."""
        board = self._find_board()
        return HostConnection(board) if self._role == "host" else DeviceConnection(board, self._layout)

    def _find_board(self) -> IvshmemDevice:
        """The one that is held. A doorbell server that died took nothing with it that a link needs, so the
        board it gave is good until there is another server.
        """
        if self._board and not self._board.lost:
            return self._board
        try:
            board = self._checked(self._open())
        except (RemoteError, OSError):
            if not self._board:
                raise
        else:
            self._release()
            self._board = board
        return self._board

    def _checked(self, board: IvshmemDevice) -> IvshmemDevice:
        room = len(board.memory)
        if self._role == "device" and self._layout.size > room:
            board.close()
            raise LocalError(
                f"queues of {self._layout.entries} entries take {self._layout.size} bytes; the shared memory "
                f"has {room}: choose a smaller depth, or give the doorbell server the same"
            )
        return board

    def turn_away(self) -> None:
        """Nobody knocks."""

    def close(self) -> None:
        """Give the board back."""
        self._release()

    def _release(self) -> None:
        if self._board:
            self._board.close()
        self._board = None

    def __str__(self) -> str:
        return f"the {'device' if self._role == 'host' else 'host'} at {self._where}"
