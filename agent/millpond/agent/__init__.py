"""The daemon on a device."""
