"""The host daemon, its fleet, federated coordination, and the command line."""
