# SPDX-License-Identifier: Apache-2.0
"""The monitor: fleet and jobs over time, as seen by a client of the daemon's socket."""
