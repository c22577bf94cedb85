"""Bytes under keys: memory, local directory, S3, and wrappers around them. Knows nothing of disks."""
