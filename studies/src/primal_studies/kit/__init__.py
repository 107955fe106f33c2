"""What studies share: tables, pictures, timing."""
