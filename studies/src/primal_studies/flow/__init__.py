"""Studies of flow."""
