# SPDX-License-Identifier: Apache-2.0
"""A launched script's process and its sandbox, for the agent and the host daemon."""
