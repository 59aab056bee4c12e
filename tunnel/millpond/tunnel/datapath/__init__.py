# SPDX-License-Identifier: Apache-2.0
"""The datapath: loops that carry packets between an interface and a queue pair, in Python and in C."""
