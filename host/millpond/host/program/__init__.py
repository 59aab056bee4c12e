# SPDX-License-Identifier: Apache-2.0
"""A fleet and its jobs for programs and notebooks: ``from millpond import Fleet``."""
