# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'sign': signs a job's code with the key of a device's owner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpond.base.errors import ConfigError, LocalError
from millpond.host.cli.options import FormatOption, new_app
from millpond.host.terminal import printing
from millpond.host.terminal.printing import Format
from millpond.linux import ssh_signatures
from millpond.linux.files import write_durably
from millpond.train.job import file
from millpond.train.job.signed_code import NAMESPACE, digest

app = new_app()


@app.command("sign")
def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml")],
    key: Annotated[Path, typer.Option(metavar="FILE", help="The owner's private SSH key.")],
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
