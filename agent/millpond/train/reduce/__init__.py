# SPDX-License-Identifier: Apache-2.0
"""Sums of updates and gradients whose bits do not depend on the order of arrival."""
