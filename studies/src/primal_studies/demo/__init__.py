"""Studies of demo."""
