"""Sandboxes: namespaces, Landlock, seccomp, and starting commands inside them."""
