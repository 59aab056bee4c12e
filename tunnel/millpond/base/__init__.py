"""Errors, deadlines, typed plain data, TOML and text: what every other package stands on."""
