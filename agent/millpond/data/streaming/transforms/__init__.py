# SPDX-License-Identifier: Apache-2.0
"""Transforms of samples at a data service: a user's functions, in the service's process or another."""
