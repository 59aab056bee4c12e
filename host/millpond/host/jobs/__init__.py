# SPDX-License-Identifier: Apache-2.0
"""Training jobs: the service that runs them, and what both kinds of job share."""
