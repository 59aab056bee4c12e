# SPDX-License-Identifier: Apache-2.0
"""Messages and RPC between a host and its devices."""
