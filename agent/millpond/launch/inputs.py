# SPDX-License-Identifier: Apache-2.0
"""Edge: the files that come behind a Launch: those of the script's folder, and wheels to install."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, ProtocolError
from millpond.train.distributed.launch_messages import SAVED_PART, InputPart, InputsEnd, check_path
from millpond.train.job.wheels import fitting, members
from millpond.wire.channel import Channel

PART_SECONDS = 600.0
"""How long the next part may take: those of other workers may come before it."""


def lay_out(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files into ``folder``. Raises OSError."""
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def receive_inputs(channel: Channel, folder: Path) -> None:
    """Receive files into ``folder``, and install the wheels among them that fit, until there are no more.
    Raises ConfigError, OSError for the first that went wrong, once all have come.
    """
    wheels = folder.with_name(f"{folder.name}-wheels")
    problem: Exception | None = None
    with contextlib.ExitStack() as stack:
        file: IO[bytes] | None = None
        while isinstance(part := _next(channel), tuple):
            try:
                if not problem:
                    file = _write(part, wheels if part[0].wheel else folder, file, stack)
            except (ConfigError, OSError) as error:
                problem = error
    if problem:
        raise problem
    if wheels.exists():
        _install(wheels)


def _next(channel: Channel) -> tuple[InputPart, bytes] | None:
    head = channel.receive(Deadline.after(PART_SECONDS))
    if isinstance(head.message, InputsEnd):
        return None
    if not isinstance(head.message, InputPart):
        raise ProtocolError(f"it sent '{head.message.NAME}' where files belong")
    data = channel.receive_payload(SAVED_PART, Deadline.after(PART_SECONDS)) if head.payload_size else b""
    return head.message, bytes(data)


def _write(
    part: tuple[InputPart, bytes], folder: Path, file: IO[bytes] | None, stack: contextlib.ExitStack
) -> IO[bytes]:
    """Write a part to its file; return that file."""
    about, data = part
    if file is None or about.start == 0:
        check_path(about.path)
        stack.close()  # the one before
        (folder / about.path).parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context((folder / about.path).open("wb"))
    file.write(data)
    return file


def _install(folder: Path) -> None:
    """Unpack the wheels that fit into ``folder``, from which modules are imported then."""
    for name in fitting([path.name for path in folder.iterdir()]):
        try:
            with zipfile.ZipFile(folder / name) as archive:
                for target, entry in members(archive.infolist(), f"wheels: {name}").items():
                    (folder / target).parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(entry) as packed, (folder / target).open("wb") as out:
                        shutil.copyfileobj(packed, out)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"wheels: {name}: damaged: {error}") from None
    for path in folder.glob("*.whl"):
        path.unlink()
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)  # of programs that the script starts
