# SPDX-License-Identifier: Apache-2.0
"""Local training: epochs over a device's own samples, and the score of a model."""
