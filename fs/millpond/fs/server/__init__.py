"""The volume's server: connections, sessions with a reply cache, request handlers."""
