"""What millpond needs of Linux and Python lacks: namespaces, mounts, passed descriptors, sd_notify."""
