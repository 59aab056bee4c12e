# SPDX-License-Identifier: Apache-2.0
"""The energy that a machine takes: sensors and joules."""
