"""An NVMe/TCP target of the device: the volume's blocks, and the tunnel in vendor commands."""
