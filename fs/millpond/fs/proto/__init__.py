# SPDX-License-Identifier: Apache-2.0
"""The messages of the volume's protocol, their codecs and their validation."""
