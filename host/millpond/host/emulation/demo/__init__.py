# SPDX-License-Identifier: Apache-2.0
"""The demo: data, steps and report."""
