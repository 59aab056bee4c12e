"""Linux features that Python has no binding for: namespaces, mounts, sandboxes, passed descriptors,
sd_notify.
"""
