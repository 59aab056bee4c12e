# SPDX-License-Identifier: Apache-2.0
"""Tables and live views for a terminal, JSON for programs."""
