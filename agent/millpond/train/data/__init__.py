"""Samples from files."""
