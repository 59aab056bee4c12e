# SPDX-License-Identifier: Apache-2.0
"""Entry: the demo's steps, as commands of a user inside the emulated machine."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from millpond.base.errors import RemoteError
from millpond.host.api.daemon import DeviceInfo, JobInfo
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.emulation import machine
from millpond.host.emulation.demo import report as demo_report
from millpond.host.emulation.demo.prepare import DEVICES, TRACER
from millpond.host.records.jobs import Round
from millpond.host.remote import device_data, ssh
from millpond.host.terminal import tables
from millpond.linux.confinement.sandbox import accept_signals
from millpond.linux.syscalls import die_with_parent
from millpond.train.job import file
from millpond.wire.control_messages import SSH_PORT

START_SECONDS = 60.0
COMMAND = "uname -a; ls"
ACCURACY = 0.95


def run(directory: Path, seed: int) -> int:
    """Train, inspect the devices, report. Returns an exit code."""
    die_with_parent(signal.SIGKILL)
    accept_signals()
    started = time.monotonic()
    console = tables.console()
    fleet = directory / "fleet"
    console.print(tables.devices(_wait_for_fleet(fleet, console)))
    console.rule("federated averaging: digits, private on their devices")
    info, rounds = _train(fleet, directory / "digits.toml", seed, console)
    shell = _ssh(fleet, DEVICES[0])
    listings = [_list_volume(fleet, device) for device in DEVICES]
    with DaemonClient(fleet) as client:
        ledgers, devices = client.ledgers(), client.devices()
    facts = demo_report.Facts(info, rounds, ledgers, devices, shell, listings, time.monotonic() - started)
    report = demo_report.build(facts, directory, TRACER)
    demo_report.show(report, console)
    return _verdict(report)


def _wait_for_fleet(fleet: Path, console: Console) -> Sequence[DeviceInfo]:
    """Return the devices once all of them are ready. Raises LocalError, RemoteError."""
    deadline = time.monotonic() + START_SECONDS
    with console.status("switching on a host and 3 emulated devices"):
        while machine.is_starting(fleet) and time.monotonic() < deadline:
            time.sleep(0.1)
    with DaemonClient(fleet) as client:
        devices = client.devices()
    if states := ", ".join(f"{d.name} {d.state} ({d.reason})" for d in devices if d.state != "ready"):
        raise RemoteError(f"the fleet did not start in {START_SECONDS:.0f} s: {states}; see {fleet}/host.log")
    return devices


def _train(fleet: Path, job_file: Path, seed: int, console: Console) -> tuple[JobInfo, list[Round]]:
    text = job_file.read_text().replace("seed = 7", f"seed = {seed}")
    job_file.write_text(text)
    job, code = file.read(job_file)
    with DaemonClient(fleet) as client:
        number = client.submit(job, code)
        info, rounds = tables.JobView(console, DEVICES).follow(client.watch(number))
    if info.state != "done":
        raise RemoteError(f"the job {info.state}: {info.error}")
    return info, rounds


def _ssh(fleet: Path, device: str) -> dict[str, Any]:
    """Run two commands as a user on a device: one that is allowed, one that must be refused."""
    results: dict[str, Any] = {"device": device}
    for name, command in (("command", COMMAND), ("private", "ls /volume/private /flash")):
        with DaemonClient(fleet) as client, client.dial(device, SSH_PORT) as sock:
            results[name] = {"line": command} | ssh.capture(client.fleet, device, sock, command)
    return results


def _list_volume(fleet: Path, device: str) -> dict[str, Any]:
    """Mount a device's volume on the host, list it and read a public file."""
    with device_data.mounted(fleet, device) as volume:
        return {
            "device": device,
            "files": sorted(str(path.relative_to(volume)) for path in volume.rglob("*") if path.is_file()),
            "private_exists": (volume / "private").exists(),
            "public_text": (volume / "public" / "README.txt").read_text(),
        }


def _verdict(report: dict[str, Any]) -> int:
    """Return 0 if the report fulfils the demo's promises, else print the failures and return 1."""
    failures = [
        text
        for wrong, text in (
            (report["accuracy"] < ACCURACY, f"the accuracy is below {ACCURACY}"),
            (report["private_bytes_leaked"] != 0, "private bytes left a device"),
            (report["privacy"]["control_found"] < len(DEVICES), "the search did not find its controls"),
            (any(volume["private_exists"] for volume in report["volumes"]), "the host sees a private part"),
            (report["ssh"]["private"]["exit_code"] == 0, "the SSH user sees the private part"),
            (report["ssh"]["command"]["exit_code"] != 0, "the SSH command failed"),
        )
        if wrong
    ]
    for failure in failures:
        print(f"millpond: the demo failed: {failure}", file=sys.stderr)
    return 1 if failures else 0
