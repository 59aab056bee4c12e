"""What a job is, and its TOML file."""
