# SPDX-License-Identifier: Apache-2.0
"""The commands that reach devices over SSH, or let other programs reach them."""
