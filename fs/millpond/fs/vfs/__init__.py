# SPDX-License-Identifier: Apache-2.0
"""The file-system interfaces, by inode and by path, and their plain types."""
