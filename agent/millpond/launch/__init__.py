"""A launched script's process and its sandbox, for the agent and the host daemon."""
