# SPDX-License-Identifier: Apache-2.0
"""The host: its daemon and its commands."""
