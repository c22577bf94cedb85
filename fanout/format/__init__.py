"""The on-store format, pure: bytes to values and back. No I/O, clock, randomness or async."""
