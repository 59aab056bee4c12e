# SPDX-License-Identifier: Apache-2.0
"""Reduction nodes on the device: their confined process, and what the agent does for it."""
