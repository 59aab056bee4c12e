# SPDX-License-Identifier: Apache-2.0
"""One endpoint of a tunnel: its supervisor, its pumps, and the zygote that it may be forked from."""
