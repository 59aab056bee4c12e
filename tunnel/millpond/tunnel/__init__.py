"""The TCP/IP link between host and device, carried in NVMe-style commands."""

from millpond.tunnel.process import TunnelEnd, spawn_end

__all__ = ["TunnelEnd", "spawn_end"]
