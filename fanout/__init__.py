"""fanout: run many commands at once on one shared, versioned, S3-backed disk."""
