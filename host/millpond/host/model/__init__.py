"""Plain results that are stored, sent and shown."""
