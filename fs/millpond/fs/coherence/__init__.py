"""Delegations, recalls and leases, for hosts and for the device's own mount."""
