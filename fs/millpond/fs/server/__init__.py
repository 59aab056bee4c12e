# SPDX-License-Identifier: Apache-2.0
"""The volume's server: connections, sessions with a reply cache, request handlers."""
