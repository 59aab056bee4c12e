# SPDX-License-Identifier: Apache-2.0
"""Support of confined launches: the product's launch on the host's side, and on each device's the product's
agent for scripts, in this process; between them a Unix socket in the place of tunnel and TLS.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.gate import Gate, LedgerCounters, ledger
from millpond.agent.launched_script import LaunchedScripts
from millpond.agent.policy.settings import Policy
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import MillpondError
from millpond.host.api.launch import LaunchEnded, LaunchOutput, LaunchPrepares, LaunchSaved
from millpond.host.fleet.device import Device
from millpond.host.launch.inputs import LaunchInputs
from millpond.host.launch.run import LaunchRun
from millpond.host.launch.workers import HostPlace, LaunchWorker
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import Launch
from millpond.wire.channel import Channel

from ..audited import unlogged_sessions

Images = NDArray[np.uint8]
SECONDS = 60.0


class NearDevice:
    """A device whose agent runs scripts in this process; a host that calls ``control`` reaches it."""

    def __init__(self, base: Path, name: str, zygote: Zygote, policy: Policy, privacy: Privacy) -> None:
        self.volume, self.state = base / name / "volume", base / name / "state"
        for part in ("public", "private/digits", "private/other"):
            (self.volume / part).mkdir(parents=True)
        link = LinkConfig("10.77.0.2/30", str(base / "s"))
        config = AgentConfig(
            name,
            link,
            flash=str(self.volume),
            volume=str(self.volume),
            state=str(self.state),
            privacy=privacy,
            policy=policy,
        )
        self.gate = Gate((), LedgerCounters.in_memory())
        self._scripts = LaunchedScripts(config, self.gate, [], lambda: 0, zygote, unlogged_sessions)
        self._threads: list[threading.Thread] = []

    @property
    def sent(self) -> dict[str, int]:
        """The bytes that have left, by kind."""
        return ledger(self.gate, [])[0]

    @property
    def log(self) -> str:
        """What scripts printed that stayed here."""
        return "".join(path.read_text() for path in sorted(self.state.parent.rglob(".millpond-logs/*.log")))

    @contextlib.contextmanager
    def control(self, _deadline: Deadline) -> Iterator[Channel]:
        """As the host's connection to an agent."""
        near, far = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(far,))
        thread.start()
        try:
            with Channel(near, "the device") as channel:
                yield channel
        finally:
            thread.join(SECONDS)

    def _serve(self, sock: socket.socket) -> None:
        with Channel(sock, "host", outlet=self.gate.outlet()) as host, contextlib.suppress(MillpondError):
            self._scripts.serve(host.expect(Launch, Deadline.after(SECONDS)), host)


@dataclass
class Ran:
    """What a launch's client has got."""

    ended: LaunchEnded
    lines: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


class Launcher:
    """A host and devices whose volumes hold digits of their own."""

    def __init__(
        self,
        base: Path,
        zygote: Zygote,
        parts: Sequence[Images] = (),
        policy: Policy | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        self._zygote, self.base = zygote, base
        policy, privacy = policy or Policy(), privacy or Privacy()
        self.devices = {
            f"csd{n}": NearDevice(base, f"csd{n}", zygote, policy, privacy)
            for n in range(max(1, len(parts) - 1))
        }
        self.public = base / "public"
        for folder, images in zip(self._folders(), parts, strict=False):
            folder.mkdir(parents=True, exist_ok=True)
            np.save(folder / "images.npy", images)

    def _folders(self) -> list[Path]:
        """Where the digits of each rank lie."""
        own = [device.volume / "private" / "digits" for device in self.devices.values()]
        return [self.public / "digits", *own]

    def run(
        self, code: str, *arguments: str, most_saved: int = 0, script: str = "a.py", **changes: Any
    ) -> Ran:
        """Launch a script privately on the host and all devices, and follow it to its end. In its code,
        Path("/volume") is the volume's place, which is another one here.
        """
        place_of = f'next(iter(Path("{self.base}").glob("csd*/volume")), Path("/volume"))'
        code = code.replace('Path("/volume")', place_of)
        self.public.mkdir(exist_ok=True)
        names, files = ["host", *self.devices], {script: code.encode()}
        more = {"most_saved": most_saved, "confined": True} | changes
        workers = [
            LaunchWorker(name, Launch(script, arguments, files, rank, len(names), "", 0, **more), "")
            for rank, name in enumerate(names)
        ]
        place = HostPlace(self._zygote, {"csd0": self.public}, cast(LaunchInputs, None))
        devices = cast("Mapping[str, Device]", self.devices)
        near, far = socket.socketpair()
        with Channel(near, "the daemon") as client, Channel(far, "a command") as command:

            def run() -> None:
                command.send(LaunchRun(workers, devices, place, command).run(), NEVER)

            thread = threading.Thread(target=run)
            thread.start()
            ran = _followed(client)
            thread.join(SECONDS)
        return ran


def _followed(client: Channel) -> Ran:
    """All that comes until the end."""
    lines: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    while True:
        head = client.receive(Deadline.after(SECONDS))
        data = client.receive_payload(1 << 20, Deadline.after(SECONDS)) if head.payload_size else b""
        if isinstance(head.message, LaunchEnded):
            return Ran(head.message, lines, files)
        if isinstance(head.message, LaunchOutput):
            lines.setdefault(head.message.worker, []).extend(head.message.lines)
        elif not isinstance(head.message, LaunchPrepares):
            assert isinstance(head.message, LaunchSaved)
            name = f"{head.message.worker}/{head.message.path}"
            files[name] = files.get(name, b"") + data
