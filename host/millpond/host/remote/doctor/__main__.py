# SPDX-License-Identifier: Apache-2.0
"""Entry: fails, with one line, on a machine that cannot emulate a fleet: what ``make`` asks first."""

from __future__ import annotations

import sys

from millpond.base.errors import LocalError
from millpond.host.remote.doctor import machine_facts

if __name__ == "__main__":
    try:
        machine_facts.require_emulation()
    except LocalError as error:
        sys.exit(f"millpond: {error}")
