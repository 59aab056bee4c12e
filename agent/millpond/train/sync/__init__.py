"""Synchronous steps: a worker's gradients, the server's optimizer, the learning rate."""
