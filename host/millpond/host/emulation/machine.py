# SPDX-License-Identifier: Apache-2.0
"""Edge: an emulated machine: in namespaces of its own, a host with its daemon, and boards in its slots.

All processes inside die with its PID 1, and PID 1 with its parent process: nothing can be left behind. Its
networks, mounts and processes exist only inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from millpond.base.errors import LocalError, RemoteError
from millpond.fs.fuse.mounts import unmount
from millpond.fs.mount.stats_socket import read_stats
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet.directory import DeviceConfig, Fleet
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.remote.doctor.machine_facts import require_emulation
from millpond.images import boards
from millpond.images.boards import EMULATED
from millpond.images.runtime.emulated import AGENT, BoardSpec, EmulatedBoard, load_programs
from millpond.images.runtime.emulated_lan import BoardLink, make_bridge
from millpond.images.runtime.qemu import QemuBoard, QemuSpec
from millpond.images.runtime.supervisor import BoardRuntime, BoardSupervisor
from millpond.linux.confinement.sandbox import FORWARDED_SIGNALS, Sandbox, accept_signals, exit_code, spawn
from millpond.linux.file_lock import locked
from millpond.linux.logs import rotate
from millpond.linux.network import loopback_up
from millpond.linux.pid1 import reap_orphans

TEND_SECONDS = 0.1
LOOK_SECONDS = 1.0  # for which a daemon that does not answer keeps boards and Ctrl-C waiting
RESTART_SECONDS = 2.0  # between two starts of a daemon that cannot run
STOP_SECONDS = 20.0
READY_SECONDS = 60.0  # a device that is not ready by then does not keep the command back
SAME_SECONDS = 1.0  # one Ctrl-C arrives from the terminal, and again from processes that pass it on
_STARTING = (DeviceState.ABSENT, DeviceState.CONNECTING)


def emulate(
    fleet: Fleet,
    command: list[str] | None = None,
    said: str = "",
    *,
    prepares: bool = False,
    stays: bool = False,
    group: str = "",
) -> int:
    """Run a machine with the fleet's boards and daemon, until Ctrl-C or the end of ``command``, run inside;
    ``said`` is printed when nothing is in its way. The command starts when all devices are ready, or after
    READY_SECONDS. One that ``prepares`` itself starts at once, waits for the fleet on its own, and gets no
    signals before its ``accept_signals``: a Python that is still loading answers Ctrl-C with a traceback. A
    machine that ``stays`` runs on until Ctrl-C where the command has ended well. Members of ``group`` may use
    the daemon.

    Returns the exit code of the command, 0 without one. Raises LocalError if this system cannot do it, or if
    the fleet is being emulated already. All processes inside hold the lock, so it lasts as long as any of
    them lives.
    """
    require_emulation()
    with locked(fleet.directory / "emulator.lock", f"{fleet.directory} is being emulated already"):
        if said:
            print(said)
        try:
            return _run_machine(EmulatedMachine(fleet, command, prepares, stays, group))
        finally:
            unmount_all(fleet)


def unmount_all(fleet: Fleet) -> None:
    """Unmount the volumes that users have mounted on this machine: their devices are gone."""
    for mounted in read_stats(fleet.mount_stats):
        with contextlib.suppress(LocalError, OSError):
            if unmount(Path(mounted.mountpoint)):
                print(f"unmounted {mounted.device} at {mounted.mountpoint}", flush=True)


def _run_machine(machine: EmulatedMachine) -> int:
    sys.stdout.flush()
    sandbox = Sandbox(binds=None, own_network=True, own_pids=True)
    pid = spawn(sandbox, lambda: _boot(machine))
    previous = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    for number in previous:
        signal.signal(number, lambda number, _frame: os.kill(pid, number))
    try:
        return exit_code(os.waitpid(pid, 0)[1])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _boot(machine: EmulatedMachine) -> int:
    loopback_up()
    return machine.run()


def _board(fleet: Fleet, device: DeviceConfig) -> BoardRuntime:
    directory = fleet.device_directory(device.name)
    if device.board == EMULATED:
        provisioning.write_lan(fleet, device)
        lan = BoardLink(device.lan, fleet.config.lan) if device.lan else None
        return EmulatedBoard(BoardSpec(device.name, directory, device.agent or AGENT, lan))
    return QemuBoard(QemuSpec(device.name, directory, boards.read(device.board)))


def is_starting(fleet: Path) -> bool:
    """Return whether a fleet's daemon does not answer yet, or one of its devices is still to start."""
    try:
        with DaemonClient(fleet, seconds=LOOK_SECONDS) as client:
            return any(device.state in _STARTING for device in client.devices())
    except (LocalError, RemoteError):
        return True


class EmulatedMachine:
    """The processes of an emulated machine: boards, the host daemon and, if there is one, a command."""

    def __init__(
        self,
        fleet: Fleet,
        command: list[str] | None,
        prepares: bool,
        stays: bool = False,
        group: str = "",
    ) -> None:
        self._fleet, self._command, self._prepares = fleet, command, prepares
        self._stays, self._group = stays, group
        self._backplane = BoardSupervisor([_board(fleet, device) for device in fleet.config.device])
        self._daemon: subprocess.Popen[bytes] | None = None
        self._listed = self._list_version()
        self._started = self._daemon_started = time.monotonic()
        self._interrupted = 0
        self._interrupted_at = 0.0

    def run(self) -> int:
        """Run until SIGINT, SIGTERM, SIGHUP or the end of the command, and return its exit code."""
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._interrupt)
        accept_signals()
        if any(device.lan for device in self._fleet.config.device):
            make_bridge()
        if any(device.board == EMULATED for device in self._fleet.config.device):
            load_programs()
        self._backplane.power_on()
        self._start_daemon()
        command = None
        while not self._interrupted and self._lasts(command):
            if command is None and self._command and self._may_start():
                command = self._start_command(self._command)
            self._tend(command)
            time.sleep(TEND_SECONDS)
        code = self._end(command)
        self._stop()
        return code

    def _lasts(self, command: subprocess.Popen[bytes] | None) -> bool:
        return command is None or command.poll() is None or self._stays_after(command)

    def _stays_after(self, command: subprocess.Popen[bytes]) -> bool:
        """Return whether the command has ended well and leaves the machine on."""
        return self._stays and command.returncode == 0

    def _may_start(self) -> bool:
        """Return whether the command need not wait (any longer) for the fleet."""
        late = time.monotonic() > self._started + READY_SECONDS
        return self._prepares or late or not is_starting(self._fleet.directory)

    def _start_command(self, command: list[str]) -> subprocess.Popen[bytes]:
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, FORWARDED_SIGNALS if self._prepares else ()
        )  # the command inherits the mask
        try:
            return subprocess.Popen(command)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _interrupt(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._interrupted and now - self._interrupted_at > SAME_SECONDS:
            os._exit(128 + number)  # a second time: at once, and everything dies with PID 1
        if not self._interrupted:
            self._interrupted, self._interrupted_at = number, now

    def _start_daemon(self) -> None:
        argv = [sys.executable, "-m", "millpond.host.main", "host", "--fleet", str(self._fleet.directory)]
        argv += ["--group", self._group] if self._group else []
        self._daemon_started = time.monotonic()
        rotate(self._fleet.directory / "host.log")
        with (self._fleet.directory / "host.log").open("ab") as output:
            self._daemon = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _list_version(self) -> int:
        with contextlib.suppress(OSError):
            return (self._fleet.directory / "fleet.toml").stat().st_mtime_ns
        return 0

    def _switch_on_new(self) -> None:
        """Switch on emulated boards that were added to the fleet meanwhile."""
        version = self._list_version()
        if version == self._listed:
            return
        self._listed = version
        with contextlib.suppress(LocalError):  # a user may be editing the file
            fleet = directory.read(self._fleet.directory)
            for device in fleet.config.device:
                if device.board == EMULATED and device.name not in self._backplane.names:
                    self._backplane.add(_board(fleet, device))

    def _tend(self, command: subprocess.Popen[bytes] | None) -> None:
        """Restart boards and daemon that have died, as systemd and watchdogs would."""
        self._switch_on_new()
        self._backplane.tend()
        lived = time.monotonic() - self._daemon_started
        if self._daemon and self._daemon.poll() is not None and lived > RESTART_SECONDS:
            self._start_daemon()
        own = {process.pid for process in (self._daemon, command) if process}
        reap_orphans(own | self._backplane.pids)

    def _end(self, command: subprocess.Popen[bytes] | None) -> int:
        if command is None:
            return 128 + self._interrupted if self._command else 0
        if not self._interrupted or self._stays_after(command):
            code = command.wait()
            return 128 - code if code < 0 else code
        for patience in (SAME_SECONDS, STOP_SECONDS):  # a terminal's Ctrl-C has reached the command too
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(patience)
                break
            command.send_signal(self._interrupted)
        command.kill()
        command.wait()
        return 128 + self._interrupted

    def _stop(self) -> None:
        """Shut everything down, the daemon first."""
        if self._daemon:
            self._daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemon.wait(STOP_SECONDS)
        self._backplane.power_off()
