# SPDX-License-Identifier: Apache-2.0
"""Entry: what one daemon holds, fleets of 64 and 256 emulated devices and a job of 256 workers:
``python -m bench.hosts.scale``, with a table and ``scale.json``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.waiting import eventually

from bench.experiment import Experiment, Run, Unmeasured
from bench.rows import Row, summary
from millpond.host.fleet import provisioning
from system.processes import running
from system.support import Emulation, create, why_not

SIZES, QUICK_SIZES = (64, 256), (4,)
_IDLE_SECONDS, _QUICK_IDLE_SECONDS = 20.0, 3.0
_READY_SECONDS = 15.0
"""Per device, after which the fleet is given up."""
_STOP_SECONDS = 120.0
_MIB, _MIB_PER_DEVICE = 1 << 20, 80
"""The memory that a device of an emulated fleet takes, its board included."""
_ABOUT = (
    "devices are process trees of one machine, in namespaces, with agents that have loaded no torch; their "
    "start shares the machine's processors with the host's"
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What processes take: bytes resident (pages that they share counted in each), bytes that count shared
    pages by share (PSS), descriptors, threads.
    """

    resident: int = 0
    shared: int = 0
    descriptors: int = 0
    threads: int = 0


@dataclass(slots=True)
class Measured:
    """The figures of one fleet of so many devices; CPU and memory per device."""

    ready: float = 0.0
    start_cpu: float = 0.0
    host_cpu: float = 0.0
    host: Footprint = Footprint()
    daemon: Footprint = Footprint()
    device_shared: float = 0.0
    idle: float = 0.0
    idle_tunnels: float = 0.0
    restart: float = 0.0
    restart_cpu: float = 0.0
    stop: float = 0.0
    left: int = 0


def measure(run: Run) -> Sequence[Row]:
    """Return the rows of each size of fleet; those of the largest have the plain names."""
    rows = list[Row]()
    sizes = QUICK_SIZES if run.quick else SIZES
    for size in sizes:
        found, note = list[Measured](), ""
        if psutil.virtual_memory().available < size * _MIB_PER_DEVICE * _MIB:
            note = f"not measured, less than {size * _MIB_PER_DEVICE} MiB are free: "
            run.say(f"{size} devices: {note}")
        else:
            found = [_measure_fleet(run, size)]
        rows += _rows(size, found, note, "" if size == max(sizes) else f"_{size}")
    return rows


EXPERIMENT = Experiment("scale", "What one daemon holds", measure, seconds=1800, figures=("scale",))


def _measure_fleet(run: Run, size: int) -> Measured:
    found, names = Measured(), [f"csd{number}" for number in range(size)]
    with _switched_off(names) as fleet:
        began = time.monotonic()
        fleet.start()
        _wait(fleet, size)
        found.ready = time.monotonic() - began
        found.start_cpu = sum(map(_cpu_with_ended, fleet.processes())) / size
        run.say(f"{size} devices: ready in {found.ready:.1f} s, {found.start_cpu:.2f} CPU s per device")
        _look(fleet, found, size)
        _idle(fleet, found, _QUICK_IDLE_SECONDS if run.quick else _IDLE_SECONDS)
        run.say(f"{size} devices: the idle daemon takes {found.idle:.1f} % of a core")
        _restart(fleet, found, size)
        run.say(f"{size} devices: ready {found.restart:.1f} s after kill -9 of the daemon")
        began = time.monotonic()
        found.left = len(fleet.stop(_STOP_SECONDS))
        found.stop = time.monotonic() - began
        run.say(f"{size} devices: off in {found.stop:.1f} s, {found.left} processes had to be killed")
    return found


@contextmanager
def _switched_off(names: Sequence[str]) -> Iterator[Emulation]:
    """Make a fleet, which is stopped at the end. Raises Unmeasured where there can be none."""
    if complaint := why_not():
        raise Unmeasured(f"no fleet: {complaint}")
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        fleet = create(Path(folder), names)
        for name in names:
            provisioning.write_agent_config(fleet.fleet, name, {})  # nothing to search for, as by itself
        try:
            yield fleet
        finally:
            fleet.stop(_STOP_SECONDS)


def _wait(fleet: Emulation, size: int, other_than: int = 0) -> None:
    """Wait until a daemon, of another pid than that, has all devices ready."""

    def all_ready() -> bool:
        assert fleet.process
        assert fleet.process.poll() is None, fleet.logs()
        if other_than and psutil.pid_exists(other_than):
            return False
        return sum(device.state == "ready" for device in fleet.devices().values()) == size

    eventually(all_ready, f"{size} devices", 60 + _READY_SECONDS * size, 0.25)


def _look(fleet: Emulation, found: Measured, size: int) -> None:
    daemon = fleet.daemon()
    on_host = running([daemon, *daemon.children(recursive=True)])
    found.daemon, found.host = _footprint([daemon]), _footprint(on_host)
    found.host_cpu = sum(map(_cpu_with_ended, on_host)) / size
    pids = {process.pid for process in on_host}
    others = [process for process in fleet.processes() if process.pid not in pids]
    found.device_shared = _footprint(others).shared / size


def _idle(fleet: Emulation, found: Measured, seconds: float) -> None:
    daemon = fleet.daemon()
    tunnels = running(daemon.children(recursive=True))
    before, before_tunnels = _cpu(daemon), sum(map(_cpu, tunnels))
    time.sleep(seconds)
    found.idle = 100 * (_cpu(daemon) - before) / seconds
    found.idle_tunnels = 100 * (sum(map(_cpu, tunnels)) - before_tunnels) / seconds


def _restart(fleet: Emulation, found: Measured, size: int) -> None:
    killed = fleet.daemon()
    began = time.monotonic()
    os.kill(killed.pid, signal.SIGKILL)
    _wait(fleet, size, killed.pid)
    found.restart = time.monotonic() - began
    daemon = fleet.daemon()
    found.restart_cpu = sum(map(_cpu_with_ended, [daemon, *daemon.children(recursive=True)])) / size


def _cpu(process: psutil.Process) -> float:
    """Return the CPU seconds of a process; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _cpu_with_ended(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of those children that it has seen end."""
    with contextlib.suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))
    return 0.0


def _footprint(processes: Iterable[psutil.Process]) -> Footprint:
    total = Footprint()
    for each in processes:
        with contextlib.suppress(psutil.Error, OSError):
            sizes = _rollup(each.pid)
            total = Footprint(
                total.resident + sizes["Rss"],
                total.shared + sizes["Pss"],
                total.descriptors + each.num_fds(),
                total.threads + each.num_threads(),
            )
    return total


def _rollup(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}


def _rows(size: int, all_found: Sequence[Measured], note: str, of: str) -> Iterator[Row]:
    def row(figure: str, what: str, values: list[float], unit: str) -> Row:
        return summary(figure, f"{note}{size} devices: {what}", values, unit, emulation=_ABOUT)

    def each(take: str, by: float = 1.0) -> list[float]:
        return [getattr(found, take) / by for found in all_found]

    def host(take: str) -> list[float]:
        return [getattr(found.host, take) / _MIB / size for found in all_found]

    def daemon(take: str) -> list[float]:
        return [getattr(found.daemon, take) / size for found in all_found]

    yield row(f"devices_{size}_ready_s", "from 'millpond emulate' until all are ready", each("ready"), "s")
    yield row(f"start_cpu_s_per_device{of}", "CPU until then, host and device", each("start_cpu"), "s")
    yield row(f"host_cpu_s_per_device{of}", "the host's part of that CPU", each("host_cpu"), "s")
    about = "memory of the host's processes, the daemon's included"
    yield row(f"rss_mib_per_device{of}", f"{about}, shared pages in each", host("resident"), "MiB")
    yield row(f"pss_mib_per_device{of}", f"{about}, shared pages once", host("shared"), "MiB")
    board = "memory of the emulated board itself, shared pages once"
    yield row(f"board_pss_mib{of}", board, each("device_shared", _MIB), "MiB")
    yield row(f"threads_per_device{of}", "threads of the daemon", daemon("threads"), "threads")
    yield row(f"descriptors_per_device{of}", "descriptors of the daemon", daemon("descriptors"), "files")
    yield row(f"cpu_percent_idle{of}", "CPU of the idle daemon, of a core", each("idle"), "%")
    yield row(f"cpu_percent_tunnels{of}", "CPU of its idle tunnels, of a core", each("idle_tunnels"), "%")
    about = "from kill -9 of the daemon until all are ready"
    yield row(f"daemon_restart_{size}_s", about, each("restart"), "s")
    yield row(f"restart_cpu_s_per_device{of}", "the host's CPU for that", each("restart_cpu"), "s")
    yield row(f"stop_{size}_s", "from Ctrl-C until the machine is off", each("stop"), "s")
    yield row(f"killed{of}", "processes that did not end by themselves", each("left"), "processes")
