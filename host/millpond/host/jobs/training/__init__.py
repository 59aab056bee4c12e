# SPDX-License-Identifier: Apache-2.0
"""Training: one loop of exchanges, for synchronous steps and federated rounds alike."""
