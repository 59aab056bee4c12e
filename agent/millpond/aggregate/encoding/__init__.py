# SPDX-License-Identifier: Apache-2.0
"""Encodings: vectors in fewer bytes than float32 needs, with what that loses kept for the next vector."""
