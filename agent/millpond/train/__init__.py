"""The training engine that devices and the host's own worker run."""
