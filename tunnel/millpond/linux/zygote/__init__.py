# SPDX-License-Identifier: Apache-2.0
"""A zygote: a process that has loaded what its forks need, its client, and what it loads."""
