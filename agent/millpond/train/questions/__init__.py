# SPDX-License-Identifier: Apache-2.0
"""Questions about the samples of folders, whose answers are sums of whole numbers over all samples."""
