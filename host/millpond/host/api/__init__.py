# SPDX-License-Identifier: Apache-2.0
"""The messages between commands and the host daemon."""
