"""Names, headers and limits of the native API, and its query strings.

Owns what is said around a body. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, quote_from_bytes

from fanout.errors import Invalid

__all__ = [
    "AUTOMATIC",
    "BEAT",
    "HEARTBEAT_S",
    "IDEMPOTENCY",
    "INSTANCE",
    "NDJSON",
    "PREFIX",
    "RETRY_OF",
    "parse_query",
    "query",
    "takes_long_bodies",
]

#: Where the native API is on a server. A change that old clients would not understand gets another number.
PREFIX = "/api/v1"
#: Seconds after which whoever has nothing to say yet says so.
HEARTBEAT_S = 10.0
#: What is sent then: white space before a JSON document, an empty line among lines, an empty frame among frames.
BEAT = b"\n"
NDJSON = "application/x-ndjson"
#: Names a call, so that repeating it gives the first one's result.
IDEMPOTENCY = "Idempotency-Key"
#: Keys that a client makes up begin so: the server process remembers what came of them, the store does not.
AUTOMATIC = "auto-"
#: Of answers: the server process that gave it. `RETRY_OF`, of requests: this may have reached that process before.
INSTANCE = "Fanout-Instance"
RETRY_OF = "Fanout-Retry-Of"


def takes_long_bodies(path: str) -> bool:
    """Whether a call to this path brings a file or tree: its body may be as long as an object."""
    return path.startswith(PREFIX + "/disks/") and path.rpartition("/")[2] in ("object", "commit")


def query(values: Mapping[str, object]) -> str:
    """Return `?name=value&…` of what is not None: text of any bytes (surrogate escapes), true and false."""
    parts = []
    for name, value in values.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"{name}={quote_from_bytes(text.encode('utf-8', 'surrogateescape'), safe='/')}")
    return "?" + "&".join(parts) if parts else ""


def parse_query(raw: bytes, names: Iterable[str]) -> dict[str, str]:
    """Return the values of a query string; `Invalid` for a name that is not in `names`, or that comes twice."""
    known = set(names)
    values: dict[str, str] = {}
    try:
        pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True, errors="surrogateescape")
    except ValueError as error:
        raise Invalid(f"the query is malformed: {error}") from None
    for name, value in pairs:
        if name not in known:
            raise Invalid.argument("query", name, f"one of {', '.join(sorted(known))}")
        if name in values:
            raise Invalid(f"{name} is given twice")
        values[name] = value
    return values
