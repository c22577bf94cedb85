"""Multipart uploads as garbage collection sees them: which packs they still need, and which of them are over.

Owns how long an upload is kept. Reads its records and changes nothing; uploads.py makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fanout.errors import NotFound
from fanout.format import layout
from fanout.format.upload import decode_part
from fanout.store.base import Store

__all__ = ["UPLOAD_S", "UploadView", "list_uploads", "packs_of_uploads"]

#: An upload that was begun longer ago can no longer be completed, and a collection takes it.
UPLOAD_S = 7 * 24 * 3600.0


@dataclass(slots=True)
class UploadView:
    """One upload as it was listed: keys -> bytes, and when it began and ended by the store's clock (0: not seen)."""

    keys: dict[str, int] = field(default_factory=dict)
    begun_ns: int = 0
    ended_ns: int = 0

    def is_over(self, now_ns: int, grace_ns: int) -> bool:
        """Whether nobody can complete it any more, not even who looked at it before it ended and was slow."""
        if self.ended_ns:
            return self.ended_ns <= now_ns - grace_ns
        return self.begun_ns <= now_ns - grace_ns - int(UPLOAD_S * 1e9)


def list_uploads(store: Store, disk_id: str) -> dict[str, UploadView]:
    """List the uploads of all branches, by the prefix of their keys, reading no object."""
    found: dict[str, UploadView] = {}
    for meta in store.list(layout.uploads_prefix(disk_id)):
        prefix = "/".join(meta.key.split("/")[:5])
        view = found.setdefault(prefix, UploadView())
        view.keys[meta.key] = meta.size
        if meta.key.endswith("/end"):
            view.ended_ns = meta.modified_ns
        elif not view.begun_ns or meta.key.endswith("/begin"):
            view.begun_ns = meta.modified_ns
    return found


def packs_of_uploads(store: Store, view: UploadView) -> Iterator[bytes]:
    """Yield the packs that the parts of an upload are in."""
    for key in view.keys:
        if layout.part_number(key) is None:
            continue
        try:
            part = decode_part(store.get(key), key)
        except NotFound:
            continue  # completed or collected meanwhile
        for ref in part.data:
            yield ref.pack
