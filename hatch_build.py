# SPDX-License-Identifier: Apache-2.0
"""Builds the C engines into the package; without a C compiler the package has the Python engines only."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "tunnel/millpond/tunnel/datapath/datapath.c",
    "agent/millpond/aggregate/kernels.c",
    "agent/millpond/aggregate/encoding/kinds/*.c",
    "agent/millpond/aggregate/masking/masks.c",
    "agent/millpond/aggregate/udp/engine.c",
)
FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-ffp-contract=off")
"""A fused multiplication and addition would give sums other bits on some processors."""
SLOWER = "the Python engines will run: tunnels carry about 0.6 as much, and sums of updates take longer"


class EngineHook(BuildHookInterface[Any]):
    """Compiles for the processor that builds. The libraries need no Python headers: ctypes loads them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - its name is hatchling's
        """Build ``_NAME.so`` beside each ``NAME.c``, and mark the wheel as one for this platform."""
        if self.target_name != "wheel":
            return
        sources = [
            found.relative_to(self.root) for source in SOURCES for found in Path(self.root).glob(source)
        ]
        libraries = [source.with_name(f"_{source.stem}.so") for source in sources]
        for library in libraries:
            Path(self.root, library).unlink(missing_ok=True)
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if shutil.which(compiler[0]) is None:
            self.app.display_warning(f"millpond: no C compiler: {SLOWER}")
            return
        for source, library in zip(sources, libraries, strict=True):
            command = [*compiler, *FLAGS, "-o", str(Path(self.root, library)), str(Path(self.root, source))]
            if subprocess.run(command, check=False).returncode:
                Path(self.root, library).unlink(missing_ok=True)
                self.app.display_warning(f"millpond: {source} does not build: {SLOWER}")
                continue
            build_data["artifacts"].append(library.as_posix())
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
