# SPDX-License-Identifier: Apache-2.0
"""The host's client of a volume: RPC slots, caches, open files, delegations, async create, readahead."""
