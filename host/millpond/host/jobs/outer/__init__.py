# SPDX-License-Identifier: Apache-2.0
"""Resident jobs: rounds of one fleet on the order of a program outside."""
