"""A fanout server in a process of its own, as a client on another machine meets it.

Owns its start and its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.serving import Running, running_server

__all__ = ["fanout_server"]


@contextmanager
def fanout_server(
    place: Path, *arguments: str, options: Sequence[str] = (), store: str | None = None
) -> Iterator[Running]:
    """Run `fanout OPTIONS serve ARGUMENTS` without a log line for each request; the store is below `place`."""
    with running_server(place, "--log-level", "WARNING", *arguments, options=options, store=store) as running:
        yield running
