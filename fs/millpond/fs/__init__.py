# SPDX-License-Identifier: Apache-2.0
"""The shared volume: the device's flash as a file system, on the device and on the host."""
