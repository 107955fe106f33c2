"""Public implementations that studies compare with."""
