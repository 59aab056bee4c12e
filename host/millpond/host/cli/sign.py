# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands 'sign' and 'roster': sign a job's code, and the devices of a cohort, with the key of a
device's owner.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from millpond.aggregate.masking import roster as rosters
from millpond.base.errors import ConfigError, LocalError, RemoteError
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    DevicesOption,
    FleetOption,
    FormatOption,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import each_told
from millpond.linux import ssh_signatures
from millpond.linux.files import write_durably
from millpond.train.job import file
from millpond.train.job.signed_code import NAMESPACE, digest

app, roster = (
    new_app(),
    new_app(
        help="Sign which devices mask for each other, and tell them.",
        no_args_is_help=True,
    ),
)
app.add_typer(roster, name="roster")
REFUSED = 1
RosterArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The roster's file.")]
KeyOption = Annotated[Path, typer.Option(metavar="FILE", help="The owner's private SSH key.")]


@app.command("sign")
def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml")],
    key: KeyOption,
    output: FormatOption = Format.TEXT,
) -> None:
    """Sign a job's code for devices whose policy asks for that. Read the code first. The job file names the
    signature's file, as model.signature.
    """
    path, found = sign(job_file, key)
    document = {"signature": str(path), "digest": found}
    printing.show(output, document, f"{path} signs the code with digest {found}")


def sign(job_file: Path, key: Path) -> tuple[Path, str]:
    """Write the signature that a job file names. Returns its path and the digest of the code. Raises
    ConfigError, LocalError.
    """
    job, files = file.read_unsigned(job_file)
    if not job.code.signature:
        raise ConfigError(
            f'{job_file.name}: {job.table}: there is no signature; write signature = "model.sig"'
        )
    path = job_file.parent / job.code.signature
    if path.resolve().parent != job_file.parent.resolve() or job.code.signature in files:
        raise ConfigError(
            f"{job_file.name}: {job.table}: signature: must be a file of its own beside the job file"
        )
    found = digest(job.work, file.describe(files, job_file.name))
    signature = ssh_signatures.sign(key, NAMESPACE, found)
    try:
        write_durably(path, signature.encode())
    except OSError as error:
        raise LocalError(f"{error.filename}: {error.strerror}") from None
    return path, found


@roster.command("sign")
def sign_roster(
    file: RosterArgument,
    key: KeyOption,
    number: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The roster's number, by default one more than the file has."),
    ] = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Sign a roster of devices, in place. The file has the line of each device's cohort.pub, read at that
    device. To change a roster, change its lines and sign it again: its number grows.
    """
    found, _ = _read(file)
    signed = replace(found, number=found.number + 1 if number is None else number)
    text = signed.text + ssh_signatures.sign(key, rosters.NAMESPACE, signed.text)
    try:
        write_durably(file, text.encode())
    except OSError as error:
        raise LocalError(f"{error.filename}: {error.strerror}") from None
    document = {"roster": str(file), "number": signed.number, "devices": sorted(signed.devices)}
    printing.show(
        output, document, f"{file} is roster {signed.number} of {', '.join(sorted(signed.devices))}"
    )


@roster.command("send")
def send_roster(
    file: RosterArgument,
    devices: DevicesOption = "",
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> int:
    """Send a signed roster to the devices of this fleet that are in it. Each takes it if one of its owners
    has signed it and it has none as new. Exit code 1 says that a device has not taken it.
    """
    found, signature = _read(file)
    if not signature:
        raise ConfigError(f"{file}: it is not signed: `millpond roster sign` does it")
    taken, failed = list[str](), dict[str, str]()
    with DaemonClient(fleet_directory) as client:
        known = [one.name for one in client.fleet.config.device if one.name in found.devices]
        names = client.fleet.named(devices) if devices else known
        for name in each_told("roster", names, "device", shows=output is Format.TEXT):
            try:
                client.send_roster(name, file.read_text())
                taken.append(name)
            except RemoteError as error:
                failed[name] = str(error)
    lines = [f"{name}: has roster {found.number}" for name in taken]
    lines += [f"{name}: {reason}" for name, reason in failed.items()]
    document = {"number": found.number, "taken": taken, "failed": failed}
    printing.show(output, document, "\n".join(lines) or "no device of this fleet is in the roster")
    return REFUSED if failed or not taken else 0


def _read(file: Path) -> tuple[rosters.SignedRoster, str]:
    """Return the roster of a file, and its signature. Raises ConfigError, LocalError."""
    try:
        return rosters.read(file.read_text(), str(file))
    except OSError as error:
        raise LocalError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: it is no text") from None
