# SPDX-License-Identifier: Apache-2.0
"""The live view of a fleet in a terminal: an application, and lines of text for screen readers."""
