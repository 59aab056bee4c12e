# SPDX-License-Identifier: Apache-2.0
"""Delegations, recalls and leases, for hosts and for the device's own mount."""
