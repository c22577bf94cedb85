"""What people and programs read: safe text, sizes, times, tables and JSON.

Owns every rule about output. Knows no command. Whatever comes from a disk, a command or an error may hold control
characters, so nothing of it reaches a terminal except through `safe` or `name`.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "count",
    "json_document",
    "json_stream",
    "local_time",
    "milliseconds",
    "name",
    "print_table",
    "safe",
    "size",
    "stderr_console",
    "table",
    "utc",
]

#: Categories that never reach a terminal: controls, lone surrogates (undecodable bytes), line separators.
_ESCAPED = frozenset({"Cc", "Cs", "Zl", "Zp"})
#: Characters that reorder what is displayed, with which a name can pretend to be another one.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
#: No column is cut to less than this.
_KEPT_WIDTH = 20
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def safe(text: str) -> str:
    """Return `text` on one line with everything escaped that a terminal would act on."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if unicodedata.category(c) in _ESCAPED or c in _REORDERING else c for c in text)


def name(text: str) -> str:
    """Like `safe` for a path: a backslash is doubled, so that two names are never shown alike."""
    return safe(text.replace("\\", "\\\\"))


def _escape(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a surrogate escape stands for one byte
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def size(count_bytes: int) -> str:
    """Return bytes for people: `999 B`, `1.5 KiB`, `20 GiB`."""
    if count_bytes < 1024:
        return f"{count_bytes} B"
    value = float(count_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 999.5 or unit == "PiB":
            break
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"


def milliseconds(value: float) -> str:
    """Return milliseconds with as many decimals as matter to a reader."""
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def count(number: int, singular: str, plural: str | None = None) -> str:
    """Return `1 file`, `2 files`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def local_time(moment: datetime) -> str:
    """Return a time in the reader's own zone, to the second."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def utc(moment: datetime) -> str:
    """Return a time as programs read it: ISO 8601 in UTC."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def stderr_console() -> Console:
    """Return a console on stderr that interprets nothing in what it prints."""
    from rich.console import Console

    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, flexible: str | None = None, width: int | None = None
) -> list[str]:
    """Return the lines of a table, its titles first. A column whose name ends in `>` is set right.

    Over `width`, text columns are cut: `flexible` first, then the widest; numbers never. Cells must have gone
    through `safe` or `name` already.
    """
    from rich.cells import cell_len

    titles = [column.removesuffix(">") for column in columns]
    right = [column.endswith(">") for column in columns]
    cells = [titles, *(list(row) for row in rows)]
    widths = [max(cell_len(row[index]) for row in cells) for index in range(len(titles))]
    if width is not None:
        over = sum(widths) + 2 * (len(widths) - 1) - width
        text_columns = sorted((i for i in range(len(titles)) if not right[i]), key=lambda i: -widths[i])
        for index in sorted(text_columns, key=lambda i: titles[i] != flexible):
            given_up = max(0, min(over, widths[index] - _KEPT_WIDTH))
            widths[index] -= given_up
            over -= given_up
    return [
        "  ".join(_fit(cell, wide, to_right) for cell, wide, to_right in zip(row, widths, right, strict=True)).rstrip()
        for row in cells
    ]


def _fit(text: str, width: int, to_right: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    room = width - cell_len(text)
    if room < 0:
        return set_cell_size(text, width - 1) + "…"
    return " " * room + text if to_right else text + " " * room


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, flexible: str | None = None) -> None:
    """Print a table on stdout: cut to a terminal's width, whole in a pipe."""
    import shutil

    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else None
    head, *body = table(columns, rows, flexible=flexible, width=width)
    print(f"\x1b[1m{head}\x1b[0m" if on_terminal else head)
    for line in body:
        print(line)


def json_document(value: Any) -> None:
    """Print one value as one JSON document."""
    print(_dumps(value))


async def json_stream(values: AsyncIterator[Any]) -> None:
    """Print values as one JSON array, each as it comes: memory stays bounded however many there are."""
    separator = "["
    async for value in values:
        print(separator + _dumps(value), end="")
        separator = ",\n"
    print("[]" if separator == "[" else "]")


def _dumps(value: Any) -> str:
    # ASCII: undecodable names pass as escaped surrogates, which json.loads and os.fsencode turn back into bytes.
    return json.dumps(value, ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return utc(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    raise TypeError(f"{type(value).__name__} has no JSON form")
