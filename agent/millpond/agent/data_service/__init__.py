# SPDX-License-Identifier: Apache-2.0
"""The data service on the device: its confined process, and what the agent does for it."""
