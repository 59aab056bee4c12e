"""Work of commands on devices over SSH, and with the devices' volumes."""
