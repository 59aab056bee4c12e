# SPDX-License-Identifier: Apache-2.0
"""The command that writes projects, and the templates that it and others lay out."""
