# SPDX-License-Identifier: Apache-2.0
"""Functions for users: train a task in one process, or simulate a fleet in one."""
