"""Launched scripts across host and devices."""
