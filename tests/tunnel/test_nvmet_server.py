# SPDX-License-Identifier: Apache-2.0
"""The target as a process, against hosts that misbehave: it lives on and serves the next."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from millpond.base.errors import ConnectionLost
from millpond.tunnel.ring.link_params import LinkParameters
from millpond.tunnel.ring.nvme_defs import CC, Opcode
from nvmet.commands import Admin, Fabrics, Io
from nvmet.server import HANDSHAKE_SECONDS

from ..waiting import eventually
from .conftest import DEVICE_ADDRESS, INTERFACE, WITH_TARGET, End, Namespace
from .nvme_initiator import (
    ENABLE,
    HOST_ID,
    HOST_NQN,
    ICREQ,
    NQN,
    Initiator,
    capsule,
    connect_data,
    dial_through,
)

INITIATOR = Path(__file__).with_name("nvme_initiator.py")
HASTY = """
import sys
from nvmet import __main__, server
server.HANDSHAKE_SECONDS = 1.0
sys.exit(__main__.main())
"""
"""A target that waits for less time than 10 s for a connection to say what it is."""
MB = 1 << 20


class Served:
    """A target in a namespace, and a way to connect to it."""

    def __init__(self, undo: ExitStack, folder: Path, *program: str) -> None:
        side = Namespace(undo, loopback=True)
        side.program(sys.executable, str(INITIATOR), "dial", str(folder / "dial"), "4420").says("listening")
        self.dial: Callable[[], socket.socket] = dial_through(folder / "dial")
        self.backing = folder / "backing"
        self.backing.write_bytes(random.Random(1).randbytes(4 * MB))
        reader, writer = os.pipe()
        argv = [sys.executable, "-P", "-W", "error", *(program or ("-m", "nvmet"))]
        argv += [
            "--nqn",
            NQN,
            "--host-nqn",
            HOST_NQN,
            "--listen",
            "127.0.0.1:4420",
            "--backing",
            str(self.backing),
            "--interface",
            INTERFACE,
        ]
        argv += ["--address", f"{DEVICE_ADDRESS}/30", "--status-fd", str(writer)]
        self.end = End(argv, side.enter, reader)
        os.close(writer)
        undo.callback(self.end.close)
        eventually(lambda: self.end.statuses, "the target listening")
        self.at_rest = self.descriptors()

    def descriptors(self) -> set[int]:
        """Numbers of those that the target has open."""
        return {int(path.name) for path in Path(f"/proc/{self.end.process.pid}/fd").iterdir()}

    def still_serves(self) -> None:
        """An honest host is served."""
        initiator = eventually(self._connect, "an honest host connected")
        try:
            room = memoryview(bytearray(512))
            assert initiator.queues[1].submit(Io.READ, 7, 0, 0, room=room, nsid=1).status == 0
            assert room == self.backing.read_bytes()[7 * 512 : 8 * 512]
        finally:
            initiator.close()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """What is sent meanwhile comes all at once."""
        self.end.process.send_signal(signal.SIGSTOP)
        try:
            yield
            time.sleep(0.05)
        finally:
            self.end.process.send_signal(signal.SIGCONT)

    def _connect(self) -> Initiator | None:
        try:
            return Initiator(self.dial)
        except (ConnectionLost, OSError):  # the one before is not quite gone
            return None


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tun_works: None) -> Iterator[Served]:
    with ExitStack() as undo:
        yield Served(undo, tmp_path_factory.mktemp("target"))


@pytest.fixture
def served(target: Served) -> Iterator[Served]:
    """The same for all tests: none of them may harm it, or leave a connection with it."""
    yield target
    assert target.end.process.poll() is None, target.end.errors
    eventually(lambda: target.descriptors() == target.at_rest, "the target has closed what it opened")


def drain(sock: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    sock.settimeout(30)
    data = b""
    try:
        while more := sock.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


def exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, "the connection ended"
        data += more
    return bytes(data)


def pdu(sock: socket.socket) -> tuple[bytes, bytes]:
    """The next one, header and data."""
    head = exactly(sock, 8)
    head += exactly(sock, head[2] - 8)
    return head, exactly(sock, struct.unpack_from("<I", head, 4)[0] - len(head))


def connected(sock: socket.socket, qid: int, cntlid: int) -> int:
    """Make it a queue of 128 entries; the controller's ID."""
    sock.settimeout(30)
    sock.sendall(ICREQ + connect(qid, cntlid))
    exactly(sock, 128)
    result, status = struct.unpack_from("<Q6xH", pdu(sock)[0], 8)
    assert status == 0
    return int(result & 0xFFFF)


def connect(qid: int, cntlid: int) -> bytes:
    data = connect_data(cntlid, host=HOST_ID)
    return capsule(Admin.FABRICS, 1, qid << 16, 127, data=data, nsid=Fabrics.CONNECT)


def test_garbage_is_answered_with_a_termination(served: Served) -> None:
    chance = random.Random(3)
    for begin in (b"", ICREQ):
        for _ in range(10):
            with served.dial() as sock:
                sock.sendall(begin + b"\xff" + chance.randbytes(200))
                answer = drain(sock)
            last = answer[128:] if begin else answer
            assert last == b"" or last[:4] == struct.pack("<BBBB", 3, 0, 24, 0)
    served.still_serves()


def test_too_many_connections_are_refused(served: Served) -> None:
    with ExitStack() as undo:
        socks = [undo.enter_context(served.dial()) for _ in range(30)]
        refused = [sock for sock in socks[20:] if drain(sock) == b""]
        assert len(refused) == 10
    served.still_serves()


def test_a_connection_that_never_connects_is_dropped(
    undo: ExitStack, tmp_path: Path, tun_works: None
) -> None:
    hasty = Served(undo, tmp_path, "-c", HASTY)
    with hasty.dial() as sock:
        sock.sendall(ICREQ)
        began = time.monotonic()
        sock.settimeout(30)
        while sock.recv(1 << 16):
            pass
        assert 0.5 < time.monotonic() - began < HANDSHAKE_SECONDS - 1
    hasty.still_serves()


def test_a_host_that_does_not_read_costs_bounded_memory(served: Served) -> None:
    initiator = Initiator(served.dial)
    process = psutil.Process(served.end.process.pid)
    before = process.memory_info().rss
    with served.dial() as sock:
        sock.sendall(ICREQ + connect(8, initiator.cntlid))
        sock.settimeout(30)
        reads = b"".join(capsule(Io.READ, cid, 0, 0, 255, room=1 << 17, nsid=1) for cid in range(2, 120))
        sock.sendall(reads)
        time.sleep(0.5)
        assert process.memory_info().rss - before < 8 * MB
        assert initiator.queues[1].submit(Io.FLUSH, nsid=1).status == 0, "the others are not served"
        begun = process.cpu_times()
        time.sleep(0.5)
        spent = process.cpu_times()
        assert spent.user + spent.system - begun.user - begun.system < 0.2, (
            "it is busy with a host that waits"
        )
        size = 118 * ((1 << 17) + 48) + 128 + 24
        while size:
            size -= len(sock.recv(min(size, 1 << 18)))
    initiator.close()
    served.still_serves()


def test_a_full_queue_of_reads_and_writes_is_carried_out(served: Served) -> None:
    initiator = Initiator(served.dial)
    stored = served.backing.read_bytes()
    slots, room = len(stored) >> 17, 1 << 17
    reads = {cid: cid % slots for cid in range(110)}
    batch = [capsule(Io.READ, cid, slot << 8, 0, 255, room=room, nsid=1) for cid, slot in reads.items()]
    data = stored[-(68 << 10) :]
    batch += [
        capsule(Io.WRITE, cid, (len(stored) >> 9) - 136, 0, 135, data=data, nsid=1) for cid in range(110, 127)
    ]
    with served.dial() as sock:
        connected(sock, 8, initiator.cntlid)
        for _ in range(8):
            sender = threading.Thread(target=sock.sendall, args=(b"".join(batch),))
            with served.stalled():
                sender.start()
            left = set(range(127))
            while left:
                head, found = pdu(sock)
                if head[0] == 7:
                    slot = reads[struct.unpack_from("<H", head, 8)[0]]
                    assert found == stored[slot << 17 : slot + 1 << 17]
                else:
                    cid, status = struct.unpack_from("<HH", head, 20)
                    assert status == 0
                    left.remove(cid)
            sender.join()
    initiator.close()


def test_a_lost_connection_opens_no_link(served: Served) -> None:
    with served.dial() as sock:
        connected(sock, 0, 0xFFFF)
        sock.sendall(capsule(Admin.FABRICS, 1, 0, CC, ENABLE, nsid=Fabrics.PROPERTY_SET))
        pdu(sock)
        # The first 64 answers, one system call, provoke the reset; what is left then is just not too much.
        batch = [capsule(Admin.KEEP_ALIVE, cid) for cid in range(64)]
        for cid, room in enumerate([1 << 17] * 7 + [129_400], 64):
            batch.append(capsule(Admin.GET_LOG_PAGE, cid, 2 | 0x7FFF << 16, room=room))
        batch.append(capsule(Opcode.IDENTIFY, 80, data=LinkParameters(name="host").pack().ljust(4096, b"\0")))
        batch.append(capsule(Opcode.OPEN, 81, room=4096))
        with served.stalled():
            sock.sendall(b"".join(batch))
            sock.close()
    served.still_serves()
    assert served.end.status["state"] == "down", served.end.statuses


def test_a_target_without_descriptors_waits_until_it_has_some(served: Served) -> None:
    process = psutil.Process(served.end.process.pid)
    limits = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (min(set(range(1000)) - served.at_rest), limits[1]))
    with served.dial() as sock:
        time.sleep(0.1)
        begun = process.cpu_times()
        time.sleep(0.5)
        spent = process.cpu_times()
        assert spent.user + spent.system - begun.user - begun.system < 0.2, "it tries again and again"
        process.rlimit(resource.RLIMIT_NOFILE, limits)
        sock.settimeout(30)
        sock.sendall(ICREQ)
        assert exactly(sock, 128)[0] == 1
    assert sum("no connection can be taken" in line for line in served.end.errors) == 1
    served.still_serves()


def test_a_silent_host_is_given_up_and_another_served(served: Served) -> None:
    silent = Initiator(served.dial, keep_alive_ms=4000)  # another is refused before it is given up
    with pytest.raises(ConnectionLost, match="0x181"):
        Initiator(served.dial, host=bytes(16))
    eventually(lambda: silent.queues[0].sock.recv(1, socket.MSG_PEEK) == b"", "the silent host dropped")
    served.still_serves()
    silent.close()


def test_wrong_arguments_are_told(served: Served, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "nvmet", "--interface", "x", "--address", "10.0.0.1/30"]
    unlisted = [*argv, "--listen", "127.0.0.1:0", "--backing", str(served.backing)]
    result = subprocess.run(unlisted, capture_output=True, timeout=20, text=True, env=WITH_TARGET)
    assert result.returncode == 2 and "--host-nqn" in result.stderr  # it serves nobody who is not listed
    argv += ["--host-nqn", HOST_NQN]
    for wrong, code in (
        (["--listen", "nowhere", "--backing", str(served.backing)], 1),
        (["--listen", "127.0.0.1:0", "--backing", str(tmp_path / "none")], 1),
        (["--listen", "127.0.0.1:0", "--backing", str(served.backing), "--queues", "0"], 2),
        (["--listen", "127.0.0.1:0", "--backing", str(served.backing), "--idle", "30"], 2),
        (["--listen", "127.0.0.1:0", "--backing", str(served.backing), "--address", "10.0.0.1/24"], 2),
    ):
        result = subprocess.run([*argv, *wrong], capture_output=True, timeout=20, text=True, env=WITH_TARGET)
        assert result.returncode == code and "Traceback" not in result.stderr
