# SPDX-License-Identifier: Apache-2.0
"""Entry: run one endpoint of a tunnel as a program, ``python -m millpond.tunnel``."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence

from millpond.linux.malloc import trim_heap
from millpond.linux.syscalls import die_with_parent
from millpond.tunnel.endpoint.cli import parse, run


def main(argv: Sequence[str] | None = None) -> int:
    """Run an endpoint as a program of its own."""
    die_with_parent(signal.SIGKILL)
    arguments = parse(sys.argv[1:] if argv is None else argv)
    trim_heap()
    gc.freeze()  # pumps are forks: a collection in one would copy every page that it touches
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
