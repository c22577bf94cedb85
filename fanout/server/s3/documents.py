"""S3's XML: writing answers, and reading requests without trusting them.

Owns escaping, dates and the parser. Knows no operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import quote
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat
from xml.sax.saxutils import escape

from fanout.server.s3.errors import S3Error

__all__ = [
    "OWNER",
    "OWNER_ID",
    "child",
    "children",
    "document",
    "encoded",
    "error_document",
    "http_date",
    "iso_date",
    "parse_xml",
    "text",
    "xml_safe",
]

#: Whose all buckets and objects are.
OWNER_ID = "fanout"
OWNER = f"<Owner><ID>{OWNER_ID}</ID><DisplayName>{OWNER_ID}</DisplayName></Owner>"
_DECLARATION = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
#: What XML 1.0 cannot hold, not even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LATEST_S = 253_402_300_799  # 9999-12-31: what a date can say
_MAX_DEPTH = 32


def document(root: str, *parts: str) -> bytes:
    """Return an answer: the parts, already XML, in a root element of S3's namespace."""
    return f'{_DECLARATION}<{root} xmlns="{_NAMESPACE}">{"".join(parts)}</{root}>'.encode("utf-8", "replace")


def error_document(code: str, message: str, resource: str, request_id: str, fields: dict[str, str]) -> bytes:
    told = {"Code": code, "Message": message, **fields, "Resource": resource, "RequestId": request_id}
    inner = "".join(text(name, value) for name, value in told.items())
    return f"{_DECLARATION}<Error>{inner}</Error>".encode("utf-8", "replace")


def text(name: str, value: object) -> str:
    """Return one element."""
    return f"<{name}>{xml_safe(str(value))}</{name}>"


def xml_safe(value: str) -> str:
    """Escape text; what XML cannot hold becomes U+FFFD (`encoding-type=url` is the way to get such names whole)."""
    if _FORBIDDEN.search(value):
        value = _FORBIDDEN.sub("\ufffd", value)
    return escape(value, {"\r": "&#13;"})


def encoded(key: bytes, url: bool) -> str:
    """Return a key as it stands in a listing."""
    return quote(key, safe="/-_.~*") if url else xml_safe(key.decode("utf-8", "replace"))


def iso_date(ns: int) -> str:
    ms = min(max(ns // 10**6, 0), _LATEST_S * 1000)
    when = datetime.fromtimestamp(ms // 1000, UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z" if when.year >= 1000 else "1970-01-01T00:00:00.000Z"


def http_date(ns: int) -> str:
    return format_datetime(datetime.fromtimestamp(min(max(ns // 10**9, 0), _LATEST_S), UTC), usegmt=True)


def parse_xml(data: bytes, root: str) -> Element:
    """Parse a request body; `MalformedXML` for what is none, another root, or a document type (and so any entity)."""
    builder = TreeBuilder()
    parser = expat.ParserCreate(namespace_separator="}")
    depth = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise S3Error("MalformedXML")
        builder.start(name.rpartition("}")[2], {})

    def end(name: str) -> None:
        nonlocal depth
        depth -= 1
        builder.end(name.rpartition("}")[2])

    def refuse(*_: object) -> None:
        raise S3Error("MalformedXML", "A document type is not allowed.")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
        found: Element = builder.close()
    except (expat.ExpatError, AssertionError, ValueError, LookupError):
        raise S3Error("MalformedXML") from None
    if found.tag != root:
        raise S3Error("MalformedXML", f"The root element must be {root}.")
    return found


def child(element: Element, name: str) -> str | None:
    """Return the text of a child element, stripped; None where there is none."""
    found = element.find(name)
    return None if found is None else (found.text or "").strip()


def children(element: Element, name: str) -> Iterator[Element]:
    return (each for each in element if each.tag == name)
