"""One side of a tunnel: its supervisor, its processes, and the zygote that they are forked from."""
