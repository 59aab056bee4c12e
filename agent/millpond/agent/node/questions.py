# SPDX-License-Identifier: Apache-2.0
"""Pure: what a node's process asks the agent on their socket pair, one packet each: a letter, and a name."""

from __future__ import annotations

from typing import Final

DIAL: Final = b"D"
"""For a connection to the node of this name: answered by its descriptor, or by why there is none."""
PARENT: Final = b"P"
"""For whether the node of this name may ask for sums: answered by YES, or by anything else."""
YES: Final = b"Y"
