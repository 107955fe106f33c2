"""Studies of longrange."""
