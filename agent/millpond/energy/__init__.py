"""The energy that a machine takes: sensors and joules."""
