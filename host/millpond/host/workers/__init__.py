"""Workers as the host sees them, wherever they run, and the parameter server."""
