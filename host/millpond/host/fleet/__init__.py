# SPDX-License-Identifier: Apache-2.0
"""The parts of a fleet: its directory, authority, devices and mounts."""
