"""Studies of tables."""
