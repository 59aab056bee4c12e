# SPDX-License-Identifier: Apache-2.0
"""The user's task: model, data set, loss, metrics, optimizer and schedule as hooks with defaults."""
