# SPDX-License-Identifier: Apache-2.0
"""The file system that holds a volume's files: operations by inode, quota, usage."""
