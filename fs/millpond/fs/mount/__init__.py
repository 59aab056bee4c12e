# SPDX-License-Identifier: Apache-2.0
"""The two mounts of a volume: on the device and on the host."""
