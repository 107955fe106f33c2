"""Studies of the classifier beside those of aeon: accuracy and time, damage, parts, long series."""
