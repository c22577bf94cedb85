"""The command line: thin over the public API."""

from fanout.cli.root import main

__all__ = ["main"]
