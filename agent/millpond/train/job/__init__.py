# SPDX-License-Identifier: Apache-2.0
"""The job and its TOML file."""
