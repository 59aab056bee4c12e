# SPDX-License-Identifier: Apache-2.0
"""Entry: the demo's steps, as commands of a user inside the emulated machine."""

from __future__ import annotations

import shlex
import shutil
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
from millpond.host.emulation.demo.prepare import JOB, TRACER, DemoPlan
from millpond.host.records.jobs import Round
from millpond.host.remote import device_data, ssh
from millpond.host.terminal import tables
from millpond.linux.confinement.sandbox import accept_signals
from millpond.linux.syscalls import die_with_parent
from millpond.wire.control_messages import SSH_PORT

START_SECONDS = 60.0
COMMAND = "uname -a; ls"
ACCURACY = 0.95


def run(plan: DemoPlan) -> int:
    """Train, inspect the devices, report. Returns an exit code."""
    die_with_parent(signal.SIGKILL)
    accept_signals()
    started = time.monotonic()
    console = tables.console()
    fleet = plan.directory / "fleet"
    found = _wait_for_fleet(fleet, console)
    console.print(tables.devices(found, console.width))
    names = [device.name for device in found]
    info, rounds = _train(fleet, plan, names, console)
    shell = _ssh(fleet, names[0])
    listings = [_list_volume(fleet, device) for device in names]
    with DaemonClient(fleet) as client:
        ledgers, devices = client.ledgers(), client.devices()
    facts = demo_report.Facts(info, rounds, ledgers, devices, shell, listings, time.monotonic() - started)
    report = demo_report.build(facts, plan.directory, TRACER)
    demo_report.show(report, console)
    code = _verdict(report, is_plain=plan.is_plain)
    if plan.keep and not code:
        console.rule("the fleet stays on until Ctrl-C; in another terminal, try")
        console.print("\n".join(next_commands(plan, names[0])), soft_wrap=True)
    return code


def next_commands(plan: DemoPlan, device: str) -> list[str]:
    """Return what a user may try next, as lines for a shell."""
    program = "millpond" if shutil.which("millpond") else str(Path(sys.executable).with_name("millpond"))
    return [
        f"export MILLPOND_FLEET={shlex.quote(str(plan.directory / 'fleet'))}",
        f"{program} devices",
        f"{program} run {device} -- 'uname -a; ls -R public'",
        f"{program} train {shlex.quote(str(plan.directory / JOB))}",
        f"{program} jobs",
        f"{program} shell {device}",
    ]


def _wait_for_fleet(fleet: Path, console: Console) -> Sequence[DeviceInfo]:
    """Return the devices once all of them are ready. Raises LocalError, RemoteError."""
    deadline = time.monotonic() + START_SECONDS
    with console.status("switching on a host and its emulated devices"):
        while machine.is_starting(fleet) and time.monotonic() < deadline:
            time.sleep(0.1)
    with DaemonClient(fleet) as client:
        devices = client.devices()
    if states := ", ".join(f"{d.name} {d.state} ({d.reason})" for d in devices if d.state != "ready"):
        raise RemoteError(f"the fleet did not start in {START_SECONDS:.0f} s: {states}; see {fleet}/host.log")
    return devices


def _train(
    fleet: Path, plan: DemoPlan, names: Sequence[str], console: Console
) -> tuple[JobInfo, list[Round]]:
    job, code = plan.read_job()
    how = "synchronous steps" if job.synchronous else "federated averaging"
    console.rule(f"{how}: {job.name}, private on their devices")
    with DaemonClient(fleet) as client:
        number = client.submit(job, code)
        view = tables.JobView(console, names, client.job_info(number).unit)
        info, rounds = view.follow(client.watch(number))
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


def _verdict(report: dict[str, Any], *, is_plain: bool) -> int:
    """Return 0 if the report fulfils the demo's promises, else print the failures and return 1. The accuracy
    is one of a plain demo.
    """
    failures = [
        text
        for wrong, text in (
            (is_plain and report["accuracy"] < ACCURACY, f"the accuracy is below {ACCURACY}"),
            (report["private_bytes_leaked"] != 0, "private bytes left a device"),
            (
                report["privacy"]["control_found"] < len(report["devices"]),
                "the search did not find its controls",
            ),
            (any(volume["private_exists"] for volume in report["volumes"]), "the host sees a private part"),
            (report["ssh"]["private"]["exit_code"] == 0, "the SSH user sees the private part"),
            (report["ssh"]["command"]["exit_code"] != 0, "the SSH command failed"),
        )
        if wrong
    ]
    for failure in failures:
        print(f"millpond: the demo failed: {failure}", file=sys.stderr)
    return 1 if failures else 0
