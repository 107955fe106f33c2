"""Studies of lists."""
