"""Seeds and random generators."""
