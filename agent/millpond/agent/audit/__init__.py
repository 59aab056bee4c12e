# SPDX-License-Identifier: Apache-2.0
"""The audit log of the device: which answers it has given, to whom, under which policy."""
