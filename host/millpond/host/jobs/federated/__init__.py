"""Federated averaging: rounds of local training."""
