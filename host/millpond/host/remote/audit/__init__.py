# SPDX-License-Identifier: Apache-2.0
"""The audit logs of devices, as the host reads and verifies them."""
