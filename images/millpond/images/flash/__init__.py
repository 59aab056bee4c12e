"""Writing an image to a disk, a file or a BlueField card."""
