"""The demo: data, steps and report."""
