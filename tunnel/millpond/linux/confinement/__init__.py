# SPDX-License-Identifier: Apache-2.0
"""Sandboxes: namespaces, Landlock, seccomp, and commands started inside them."""
