# SPDX-License-Identifier: Apache-2.0
"""One process of ``test_group`` on a host of its own: a script in the network namespace of a file."""

from __future__ import annotations

import os
import runpy
import sys

from millpond.linux.syscalls import CLONE_NEWNET, enter_namespace

if __name__ == "__main__":
    enter_namespace(os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC), CLONE_NEWNET)
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
