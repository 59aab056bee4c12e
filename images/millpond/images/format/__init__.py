"""What an image is on disk: its manifest, its files, the seed."""
