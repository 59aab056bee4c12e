"""Sandboxes: namespaces, Landlock, seccomp, and commands started inside them."""
