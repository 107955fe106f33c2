"""Studies of surgery."""
