# SPDX-License-Identifier: Apache-2.0
"""What the parameter server computes: the optimizer that applies means, and learning rates by the batch."""
