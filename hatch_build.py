# SPDX-License-Identifier: Apache-2.0
"""Builds the C engine into the package; without a C compiler the package has the Python engine only."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "tunnel/millpond/tunnel/datapath/datapath.c"
LIBRARY = "tunnel/millpond/tunnel/datapath/_datapath.so"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC")


class EngineHook(BuildHookInterface[Any]):
    """Compiles for the processor that builds. The library needs no Python headers: ctypes loads it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - its name is hatchling's
        """Build it, and mark the wheel as one for this platform."""
        if self.target_name != "wheel":
            return
        library = Path(self.root, LIBRARY)
        library.unlink(missing_ok=True)
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if shutil.which(compiler[0]) is None:
            self.app.display_warning("millpond: no C compiler: the tunnel will run its Python engine")
            return
        command = [*compiler, *FLAGS, "-o", str(library), str(Path(self.root, SOURCE))]
        if subprocess.run(command, check=False).returncode:
            library.unlink(missing_ok=True)
            self.app.display_warning(
                "millpond: the C engine does not build: the tunnel will run its Python engine"
            )
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
