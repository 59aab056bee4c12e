# SPDX-License-Identifier: Apache-2.0
"""What an image is on disk: its manifest, its files, the seed."""
