# SPDX-License-Identifier: Apache-2.0
"""The device in cohorts: its key, for whom it masks, and what it keeps over jobs and restarts."""
