# SPDX-License-Identifier: Apache-2.0
"""The policy of a device: rules for jobs and requests, the owner's signatures, reports of errors."""
