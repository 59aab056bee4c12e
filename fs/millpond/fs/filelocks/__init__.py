"""File locks (flock and fcntl): the table, the service, and the two clients of it."""
