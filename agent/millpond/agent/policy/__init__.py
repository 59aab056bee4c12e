# SPDX-License-Identifier: Apache-2.0
"""What a device lets out: the rules for jobs and requests, the owner's signatures, reports of errors."""
