"""The messages between commands and the host daemon."""
