# SPDX-License-Identifier: Apache-2.0
"""The database of jobs, rounds and profiles."""
