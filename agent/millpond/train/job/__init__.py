# SPDX-License-Identifier: Apache-2.0
"""What a job is, and its TOML file."""
