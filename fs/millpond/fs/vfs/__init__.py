"""The file-system interfaces, by inode and by path, and their plain types."""
