"""Synchronous training: one gradient exchange per step."""
