"""Studies of series."""
