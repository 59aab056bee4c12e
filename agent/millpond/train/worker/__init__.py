"""The process that trains: its roles, the user's code, and what it says of errors."""
