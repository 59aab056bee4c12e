# SPDX-License-Identifier: Apache-2.0
"""The exporter: a fleet's figures for Prometheus."""
