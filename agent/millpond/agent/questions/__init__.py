# SPDX-License-Identifier: Apache-2.0
"""The device's part in questions about its samples: what it counts, and what of it may leave."""
