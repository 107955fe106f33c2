"""Studies of counts."""
