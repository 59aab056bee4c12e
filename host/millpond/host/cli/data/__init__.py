# SPDX-License-Identifier: Apache-2.0
"""Pure: the commands about data."""
