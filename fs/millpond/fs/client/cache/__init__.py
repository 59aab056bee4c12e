# SPDX-License-Identifier: Apache-2.0
"""The client's caches: inodes and names, data, and how their entries become invalid; what is
not sent yet.
"""
