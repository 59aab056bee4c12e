"""A model's state: its layout in a flat vector, and checkpoints."""
