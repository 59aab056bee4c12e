"""The tunnel's protocol in shared memory: layout, registers, queue pairs, link parameters, handshake."""
