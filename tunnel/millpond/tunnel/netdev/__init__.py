"""The TUN interface of an endpoint, and its address, MTU and state."""
