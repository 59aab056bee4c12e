# SPDX-License-Identifier: Apache-2.0
"""A script of the user's own, with batches tuned: process group, all-reduce, tuner."""
