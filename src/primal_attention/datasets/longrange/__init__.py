"""Long token sequences: containers and generators."""
