"""Tables and live views for a terminal, JSON for programs."""
