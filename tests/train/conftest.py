# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of workers: a volume with samples, and processes of the two roles."""

from __future__ import annotations

from .worker_process import folder, module_server, module_worker, root, server, worker

__all__ = ["folder", "module_server", "module_worker", "root", "server", "worker"]
