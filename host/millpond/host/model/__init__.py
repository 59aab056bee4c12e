"""Plain results that are recorded, sent and shown."""
