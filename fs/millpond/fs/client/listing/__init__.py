# SPDX-License-Identifier: Apache-2.0
"""A client's listings: open directories, and pages of names, with attributes or without."""
