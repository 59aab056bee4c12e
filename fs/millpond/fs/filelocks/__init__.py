# SPDX-License-Identifier: Apache-2.0
"""File locks (flock and fcntl): the table, the service, and the two clients of it."""
