"""Studies of depth."""
