# SPDX-License-Identifier: Apache-2.0
"""Federated averaging: rounds of local training."""
