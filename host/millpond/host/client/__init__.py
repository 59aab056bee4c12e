# SPDX-License-Identifier: Apache-2.0
"""The client of the host daemon: typed requests over its socket."""
