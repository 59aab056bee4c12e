# SPDX-License-Identifier: Apache-2.0
"""What is attached to files on a device: file locks, extended attributes, birth times."""
