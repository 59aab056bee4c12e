# SPDX-License-Identifier: Apache-2.0
"""What a worker and the parameter server compute: local training, optimizers, learning rates, scores."""
