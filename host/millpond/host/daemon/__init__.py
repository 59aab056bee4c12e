# SPDX-License-Identifier: Apache-2.0
"""The host daemon: what answers at its socket."""
