# SPDX-License-Identifier: Apache-2.0
"""The rules by which updates are combined, one module each: a rule's name is that of its module."""
