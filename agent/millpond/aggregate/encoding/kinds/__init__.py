# SPDX-License-Identifier: Apache-2.0
"""The encodings of updates, one module and one kernel each: an encoding's name is that of its module."""
