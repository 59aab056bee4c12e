# SPDX-License-Identifier: Apache-2.0
"""Workers as the host sees them, wherever they run, and the parameter server."""
