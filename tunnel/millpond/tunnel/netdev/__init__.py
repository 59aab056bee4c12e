# SPDX-License-Identifier: Apache-2.0
"""The TUN interface of an endpoint, and its address, MTU and state."""
