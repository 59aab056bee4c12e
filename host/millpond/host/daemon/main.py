# SPDX-License-Identifier: Apache-2.0
"""Entry: the host daemon, ``millpond host``."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from millpond.base.errors import LocalError
from millpond.energy.sensors import EnergyMeter
from millpond.host.daemon.addition import DeviceAddition
from millpond.host.daemon.server import DaemonServer
from millpond.host.fleet import directory as fleets
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.expiry import ExpiryLog
from millpond.host.fleet.forwarding import Forwarding
from millpond.host.fleet.mounts import VolumeMounts
from millpond.host.fleet.registry import DeviceRegistry
from millpond.host.fleet.sharing import opened_to
from millpond.host.jobs.context import JobContext
from millpond.host.jobs.energy import FleetMeters
from millpond.host.jobs.handed_folders import HandedFolders
from millpond.host.jobs.service import JobService
from millpond.host.launch.service import LaunchService
from millpond.host.records.jobs import HOST
from millpond.host.store.store import Store
from millpond.images.boards import EMULATED
from millpond.linux.descriptors import FEW, allow_most
from millpond.linux.file_lock import locked
from millpond.linux.logs import UnblockedHandler
from millpond.linux.notify import notify, watchdog_interval
from millpond.linux.signals import stop_event
from millpond.train.job.file_cache import FileCache
from millpond.train.job.overlays import Overlays
from millpond.train.worker.start import workers_zygote
from millpond.tunnel.endpoint.zygote_client import EndpointZygote

log = logging.getLogger("millpond.host")


def traffic(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """Return bytes (to the device, from it) by device, from the counters of the host's interfaces."""
    counters = psutil.net_io_counters(pernic=True)
    names = {fleet.interface(device.name): device.name for device in fleet.config.device}
    return {
        name: (counters[interface].bytes_sent, counters[interface].bytes_recv)
        for interface, name in names.items()
        if interface in counters
    }


def meter(fleet: Fleet, sysfs: Path = Path("/sys")) -> EnergyMeter:
    """Return the host's own energy meter. Where devices are emulated, sensors measure them too, so only
    declared watts count.
    """
    emulated = any(device.board == EMULATED for device in fleet.config.device)
    return EnergyMeter(None if emulated else sysfs, fleet.config.watts)


@contextlib.contextmanager
def running(fleet: Fleet, group: str = "") -> Iterator[Callable[[], None]]:
    """Run all parts of the daemon inside the context; the socket answers when the context is entered, members
    of the ``group``, too. Yields what puts back what other programs take away, to be called again and again.
    """
    with contextlib.ExitStack() as stack:
        refusal = f"another host daemon serves {fleet.directory}"
        stack.enter_context(locked(fleet.directory / "host.lock", refusal))
        gid = opened_to(fleet.directory, group)
        store = Store(fleet.database)
        stack.callback(store.close)
        forwarding = Forwarding(fleet)
        stack.callback(forwarding.close)
        zygote = EndpointZygote()
        stack.callback(zygote.close)
        devices = DeviceRegistry({})
        addition = DeviceAddition(fleet, devices, forwarding, lambda one: Device(fleet, one, store, zygote))
        stack.callback(addition.close)
        addition.start_all()
        meters = FleetMeters(HOST, meter(fleet), devices)
        volumes = VolumeMounts(fleet)
        stack.callback(volumes.close)
        worker_zygote = workers_zygote(fleet.config.zygote_idle)
        stack.callback(worker_zygote.close)

        files = FileCache(fleet.files)
        with contextlib.suppress(LocalError):  # which the store has logged
            files.keep(kept := store.digests())
            HandedFolders(fleet.test_data, files).keep(kept)

        counts = functools.partial(traffic, fleet)

        def make_context(changed: Callable[[], None]) -> JobContext:
            return JobContext(
                fleet,
                store,
                devices,
                volumes.folder,
                counts,
                meters.read,
                changed,
                worker_zygote,
                files,
                Overlays(fleet.overlays),
                forwarding.between,
            )

        jobs = JobService(store, make_context)
        stack.callback(jobs.close)
        jobs.resume()
        launches = LaunchService(fleet, devices, forwarding, worker_zygote, volumes.folder)
        server = DaemonServer(
            fleet, devices, jobs, files, launches, counts, forwarding.between, addition.add, gid
        )
        stack.callback(server.close)

        def mend() -> None:
            forwarding.mend([name for name, device in devices.items() if device.has_tunnel])
            server.mend()

        yield mend


def run(directory: Path, group: str = "") -> None:
    """Serve the fleet in ``directory`` until SIGTERM or SIGINT, for members of the ``group``, too. Raises
    LocalError.
    """
    form = "%(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=[UnblockedHandler()])
    fleet = fleets.read(directory)
    stop = stop_event()
    most = allow_most()
    if most < FEW:
        log.warning("only %d files may be open at once (ulimit -n): some devices and commands may wait", most)
    with running(fleet, group) as mend:
        notify("READY=1")
        log.info("the host daemon serves fleet '%s' at %s", fleet.config.name, fleet.socket)
        expiry = ExpiryLog(fleet)
        expiry.tell()
        while not stop.wait(min(watchdog_interval() or 5.0, 5.0)):
            notify("WATCHDOG=1")
            expiry.tell()
            mend()
        notify("STOPPING=1")
    log.info("stopped")
