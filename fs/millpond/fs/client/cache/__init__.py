"""What a client keeps: inodes, names, blocks, small files, and what ends their validity."""
