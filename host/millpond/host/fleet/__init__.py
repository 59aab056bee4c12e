"""What a fleet consists of: its directory, authority, devices and mounts."""
