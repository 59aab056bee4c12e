# SPDX-License-Identifier: Apache-2.0
"""The worker process: its roles, the user's code, and its reports of errors."""
