# SPDX-License-Identifier: Apache-2.0
"""The dashboard: a web page of the fleet, by a process of its own."""
