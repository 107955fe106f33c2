"""Studies of events."""
