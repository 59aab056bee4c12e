# SPDX-License-Identifier: Apache-2.0
"""Errors, deadlines, typed plain data, TOML and text: the ground that every other package stands on."""
