"""A mount made real on this host: immutable base and delta plus a private upper layer, and its diff."""
