"""The database of jobs, rounds and profiles."""
