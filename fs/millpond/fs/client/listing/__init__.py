# SPDX-License-Identifier: Apache-2.0
"""A client's listings: open directories, pages with attributes, and pages fetched ahead."""
