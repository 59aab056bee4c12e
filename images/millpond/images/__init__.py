"""Boards: what a device runs on, and how it is started."""
