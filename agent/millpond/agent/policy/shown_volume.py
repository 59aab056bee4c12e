# SPDX-License-Identifier: Apache-2.0
"""Edge: what the sandbox of foreign code shows of the volume's two parts.

The host writes to the public part, also symbolic links. By ``/proc/self/fd`` a link leads to any file that
the process has open, so that private samples would pass for public ones: beside private folders none is
followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from millpond.agent.config import AgentConfig
from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.linux.confinement.sandbox import Bind, Sandbox
from millpond.train.protocol import Folder

OWN, LOGS = ".millpond", ".millpond-logs"
"""The folders in the private part that are the agent's own: what jobs keep, and logs. Names that begin as
they do are its own, too."""


def showing_folders(sandbox: Sandbox, config: AgentConfig, folders: Sequence[Folder], place: Path) -> Sandbox:
    """Return the sandbox of a worker, that has of the volume the public part, and of the private one
    ``folders`` alone. The host can make symbolic links in public, by which private samples would pass for
    public ones: none is followed, and private folders lie below a ``place`` that it cannot know.
    """
    volume = Path(config.volume).resolve()
    found = {volume / folder.path: place / folder.path for folder in folders if not folder.public}
    # public files are read on the flash itself
    found[Path(config.flash).resolve() / PUBLIC] = volume / PUBLIC
    return showing(sandbox, volume, found)


def showing(sandbox: Sandbox, volume: Path, places: Mapping[Path, Path]) -> Sandbox:
    """Return the sandbox with folders of the resolved ``volume`` at their ``places``, read-only. Those that
    do not exist, or are reached by a link, and what the agent keeps are left out. Raises OSError.
    """
    shown = [path for path in sorted(places) if path.is_dir() and path.resolve() == path]
    binds = (Bind(path, places[path], follow_links=places[path] != volume / PUBLIC) for path in shown)
    whole = [path for path in shown if path == volume / PRIVATE]
    hidden = (places[path] / name for path in whole for name in _own_folders(path))
    return replace(sandbox, binds=(*(sandbox.binds or ()), *binds), tmpfs=(*sandbox.tmpfs, *hidden))


def _own_folders(private: Path) -> list[str]:
    """Return the names of the agent's own folders. The two are made: one that came later would be seen. Files
    tell nothing, as a trial's random bytes.
    """
    for name in (OWN, LOGS):
        with contextlib.suppress(FileExistsError):
            (private / name).mkdir(mode=0o700)
    return [path.name for path in private.glob(f"{OWN}*") if path.is_dir() and not path.is_symlink()]
