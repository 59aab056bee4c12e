"""The messages of the volume's protocol, their codecs and their validation."""
