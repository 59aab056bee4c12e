# SPDX-License-Identifier: Apache-2.0
"""Trackers of jobs: TensorBoard, MLflow, and those of users."""
