"""The host's client of a volume: RPC, open files, delegations, readahead."""
