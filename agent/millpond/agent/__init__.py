# SPDX-License-Identifier: Apache-2.0
"""The daemon on a device."""
