"""The commands of ``millpond``."""
