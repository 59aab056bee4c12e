"""Entry: one end of the tunnel as a process of its own, ``python -m millpond.tunnel``."""

from __future__ import annotations

import gc
import signal
import sys

from millpond.linux.malloc import trim_heap
from millpond.linux.syscalls import die_with_parent
from millpond.tunnel.endpoint.cli import parse, run


def main() -> int:
    """Run an end as a program of its own."""
    die_with_parent(signal.SIGKILL)
    arguments = parse(sys.argv[1:])
    trim_heap()
    gc.freeze()  # pumps are forks: what a collection touches they would have copies of
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
