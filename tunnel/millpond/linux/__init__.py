# SPDX-License-Identifier: Apache-2.0
"""Linux features that Python has no binding for: namespaces, mounts, sandboxes, passed descriptors,
sd_notify.
"""
