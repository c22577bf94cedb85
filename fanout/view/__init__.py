"""Views: a disk's tree made real on a host, and what a command changed turned back into a commit."""
