# SPDX-License-Identifier: Apache-2.0
"""Synchronous steps: a worker's gradients, the server's optimizer, the learning rate."""
