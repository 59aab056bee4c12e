# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'audit': shows what a device has answered, from the log that the device signs."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.base.errors import LocalError
from millpond.host.cli.options import DEFAULT_FLEET, DeviceArgument, FleetOption, FormatOption, new_app
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.fleet import directory
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import waiting
from millpond.wire.audit_log import is_nonce

if TYPE_CHECKING:
    from millpond.host.records.audit import AuditVerdict
    from millpond.host.remote.audit.reading import AuditLogCopy

app = new_app()


@app.command()
def audit(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    verify: Annotated[
        bool, typer.Option("--verify", help="Verify signatures, and that the log has only grown since.")
    ] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="Verify, and forget which entries this host has seen before.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Save the signed log, to be verified without a fleet."),
    ] = None,
    saved: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Read a saved log, without a daemon.")
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option("--ca", metavar="FILE", help="With --from: the certificate of the fleet's authority."),
    ] = None,
    nonce: Annotated[
        str,
        typer.Option(metavar="TEXT", help="With --save or --from: what the device is to sign with its log."),
    ] = "",
    job: Annotated[str, typer.Option(metavar="JOB", help="Show one job alone: its name or number.")] = "",
    entries: Annotated[
        bool, typer.Option("--entries", help="Show each entry, rather than a line for each job.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show what a device has answered, to whom, by job.

    The device writes a log of that, with its policies, whose entries are chained by hashes, and signs it.
    """
    if nonce and not is_nonce(nonce):
        raise LocalError("--nonce has 16 to 128 letters, digits, '.', '-' and '_'")
    if saved:
        if save or anew:
            raise LocalError("--from reads a file: leave --save and --anew out")
        copy, verdict = _from_file(saved, device, authority or fleet_directory, nonce, verify=verify)
    else:
        if authority or (nonce and not save):
            raise LocalError("--ca is for --from, and --nonce for --from and --save")
        shows = output is Format.TEXT
        copy, verdict = _from_device(
            fleet_directory, device, nonce, save, verify=verify or anew, anew=anew, shows=shows
        )
    _show(copy, verdict, job, entries=entries, output=output)


def _from_device(
    fleet: Path, device: str, nonce: str, save: Path | None, *, verify: bool, anew: bool, shows: bool
) -> tuple[AuditLogCopy, AuditVerdict | None]:
    """Return the log of a device, and what was verified of it; save it in a file, if there is one."""
    from millpond.host.remote.audit import reading

    wanted = (nonce or secrets.token_hex(16)) if verify or save else ""
    with DaemonClient(fleet) as client:
        began = time.time()
        with waiting(device, "sends its audit log", shows=shows) as tell:
            copy, verdict = reading.read(client, device, wanted, tell), None
        if verify:
            from millpond.host.remote.audit import verification  # imports cryptography, which takes long

            verdict = verification.verify(client.fleet, copy, anew=anew)
    if save:
        from millpond.host.remote.audit import saved

        saved.save(save, copy, began)
    return copy, verdict


def _from_file(
    path: Path, device: str, trusted: Path, nonce: str, *, verify: bool
) -> tuple[AuditLogCopy, AuditVerdict | None]:
    """Return the log of a device in a file, and what was verified of it by what is ``trusted``: the file of
    an authority's certificate, or the directory of a fleet.
    """
    from millpond.host.remote.audit import saved

    copy, at = saved.load_copy(path, device)
    if not verify:
        return copy, None
    from millpond.host.remote.audit import verification

    if not trusted.exists():
        raise LocalError(f"there is no {trusted}: --ca names the certificate of the fleet's authority")
    authority = directory.read(trusted).identity.authority if trusted.is_dir() else trusted
    return copy, verification.verify_saved(authority, copy, at, nonce)


def _show(
    copy: AuditLogCopy, verdict: AuditVerdict | None, job: str, *, entries: bool, output: Format
) -> None:
    from millpond.host.records.audit import is_of, summary
    from millpond.host.terminal import audit_table, tables
    from millpond.wire.audit_log import described

    line, document = audit_table.verdict_line(verdict), {"device": copy.device, "verified": verdict}
    if entries:
        shown = [described(entry) for entry in copy.entries if not job or is_of(entry.event, job)]
        lines = [*map(audit_table.entry_line, shown), line]
        printing.show(output, document | {"entries": shown}, "\n".join(lines))
    else:
        found = summary(copy.entries, job)
        printing.show(
            output,
            document | {"summary": found},
            lambda: audit_table.show(found, line, tables.console().width),
        )
