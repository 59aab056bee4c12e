"""The parts of a fleet: its directory, authority, devices and mounts."""
