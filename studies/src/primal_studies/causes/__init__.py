"""Studies of causes."""
