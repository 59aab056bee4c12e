"""The messages and RPC that cross the link between a host and its devices."""
