"""Errors, deadlines, typed plain data, TOML and text: the ground that every other package stands on."""
