"""Messages and RPC between a host and its devices."""
