"""The S3 gateway: disks as buckets. `gateway.S3Gateway` is the ASGI application; docs/S3.md says what it does."""
