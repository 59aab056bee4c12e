# SPDX-License-Identifier: Apache-2.0
"""What a worker computes: local training by its loops, samples in batches, scores."""
