# SPDX-License-Identifier: Apache-2.0
"""The commands for the volumes of devices."""
