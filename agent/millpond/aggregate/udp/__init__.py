# SPDX-License-Identifier: Apache-2.0
"""A light protocol for a LAN: exact means of vectors that come and go as indexed UDP datagrams."""
