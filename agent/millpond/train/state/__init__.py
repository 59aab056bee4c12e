# SPDX-License-Identifier: Apache-2.0
"""A model's state: its layout in a flat vector, and checkpoints."""
