"""Event logs and irregular series: containers, readers and generators."""
