"""What commands do on devices over SSH, and with their volumes."""
