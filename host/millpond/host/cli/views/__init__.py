# SPDX-License-Identifier: Apache-2.0
"""The commands that show a fleet for as long as they run."""
