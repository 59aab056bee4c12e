# SPDX-License-Identifier: Apache-2.0
"""The simulations of ``millpond simulate``: a fleet, or two tiers of storage."""
