# SPDX-License-Identifier: Apache-2.0
"""An agent that never gets ready: no tunnel, no SSH."""

import time

time.sleep(10_000)
