# SPDX-License-Identifier: Apache-2.0
"""What ``millpond simulate`` simulates: a fleet, or two tiers of storage."""
