# SPDX-License-Identifier: Apache-2.0
"""Writing an image to a disk, a file or a BlueField card."""
