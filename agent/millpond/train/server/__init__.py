# SPDX-License-Identifier: Apache-2.0
"""The parameter server's computation: the optimizer that applies means, and learning rates by the batch."""
