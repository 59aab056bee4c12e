# SPDX-License-Identifier: Apache-2.0
"""Plain results that are stored, sent and shown."""
