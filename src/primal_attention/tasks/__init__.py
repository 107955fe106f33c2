"""What people do with the models, one folder a domain."""
