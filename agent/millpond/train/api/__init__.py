# SPDX-License-Identifier: Apache-2.0
"""What users call: a task trained in one process, or a fleet simulated in one."""
