# SPDX-License-Identifier: Apache-2.0
"""Edge: what the sandbox of foreign code shows of the volume's two parts.

The host writes to the public part, also symbolic links. By ``/proc/self/fd`` a link leads to any file that
the process has open, so that private samples would pass for public ones: beside private folders none is
followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from millpond.fs.store.layout import PRIVATE, PUBLIC
from millpond.linux.confinement.sandbox import Bind, Sandbox

OWN = ".millpond"
"""The beginning of the names in the private part that are the agent's own: logs, and what jobs keep."""


def showing(sandbox: Sandbox, volume: Path, places: Mapping[Path, Path]) -> Sandbox:
    """Return the sandbox with folders of the resolved ``volume`` at their ``places``, read-only. Those that
    do not exist, or are reached by a link, and what the agent keeps are left out.
    """
    shown = [path for path in sorted(places) if path.is_dir() and path.resolve() == path]
    binds = (Bind(path, places[path], follow_links=places[path] != volume / PUBLIC) for path in shown)
    whole = [places[path] for path in shown if path == volume / PRIVATE]
    hidden = (place / own.name for place in whole for own in (volume / PRIVATE).glob(f"{OWN}*"))
    return replace(sandbox, binds=(*(sandbox.binds or ()), *binds), tmpfs=(*sandbox.tmpfs, *hidden))
