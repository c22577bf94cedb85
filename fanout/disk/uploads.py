"""Multipart uploads of one disk: begun, filled part by part and finished by any process that has the bucket.

Owns the records of uploads and the promises about their data. Knows no S3. Blocking, thread safe.

Nothing refers to a part's packs but its record, and a collection goes by the records (leftovers.py). So a part is
recorded soon after it was stored, and a commit of parts asks `require` about each tree it tries to follow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fanout.disk.fresh import PackAges
from fanout.disk.leftovers import UPLOAD_S
from fanout.disk.record import create_record
from fanout.errors import Exists, NotFound
from fanout.format import layout
from fanout.format.upload import (
    PartRecord,
    UploadEnd,
    UploadRecord,
    decode_end,
    decode_part,
    decode_upload,
    encode_end,
    encode_part,
    encode_upload,
)
from fanout.runtime import Runtime
from fanout.store.base import Store

__all__ = ["NoUpload", "Part", "Uploads"]

_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_DELETE_BATCH = 1000


class NoUpload(NotFound):
    """The upload never was, was aborted or completed, or is too old."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part and the key of its record."""

    record: PartRecord
    key: str


class Uploads:
    """The uploads of one disk."""

    def __init__(self, store: Store, disk_id: str, runtime: Runtime, ages: PackAges, recorded_s: float) -> None:
        self._store = store
        self._disk_id = disk_id
        self._runtime = runtime
        self._ages = ages
        self._recorded_ns = int(recorded_s * 1e9)

    def begin(self, branch_uuid: str, record: UploadRecord) -> str:
        """Record a new upload and return its id."""
        upload_id = self._runtime.hex_id(32)
        key = layout.upload_begin_key(self._disk_id, branch_uuid, upload_id)
        create_record(self._store, key, encode_upload(record), "the id is taken", self._runtime)
        return upload_id

    def get(self, branch_uuid: str, upload_id: str) -> UploadRecord:
        """Return an upload that is under way; `NoUpload`."""
        record = self._load(branch_uuid, upload_id)
        self._require_young(record, upload_id)
        if self.end(branch_uuid, upload_id) is not None:
            raise NoUpload(f"the upload {upload_id!r} is over")
        return record

    def require(self, branch_uuid: str, upload_id: str, record: UploadRecord) -> None:
        """Raise `NoUpload` unless an upload that was got before is still under way; to be asked by a commit's plan.

        A collection keeps what an upload needs for its whole grace after the end, so that a commit that was planned
        before the end can land.
        """
        self._require_young(record, upload_id)
        if self._store.head(layout.upload_end_key(self._disk_id, branch_uuid, upload_id)) is not None:
            raise NoUpload(f"the upload {upload_id!r} is over")

    def end(self, branch_uuid: str, upload_id: str) -> UploadEnd | None:
        """Return how an upload ended, or None while it did not."""
        if _UPLOAD_ID.fullmatch(upload_id) is None:
            return None
        key = layout.upload_end_key(self._disk_id, branch_uuid, upload_id)
        try:
            return decode_end(self._store.get(key), key)
        except NotFound:
            return None

    def add_part(self, branch_uuid: str, upload_id: str, part: PartRecord) -> None:
        """Record a part whose packs are stored. `Limit`: storing it took too long."""
        packs = {ref.pack for ref in part.data}
        self._ages.check(packs)
        key = layout.part_key(
            self._disk_id, branch_uuid, upload_id, part.number, part.modified_ns, self._runtime.hex_id(8)
        )
        create_record(self._store, key, encode_part(part), "the id is taken", self._runtime)
        self._ages.forget(packs)

    def parts(self, branch_uuid: str, upload_id: str, after: int = 0) -> Iterator[Part]:
        """Yield the parts with a number greater than `after`, by number, those sent again in order of their time.

        One that was recorded too long after it was stored is left out: its data may be gone.
        """
        prefix = layout.upload_prefix(self._disk_id, branch_uuid, upload_id) + "part/"
        for meta in self._store.list(prefix, start_after=f"{prefix}{after:05d}~"):
            if layout.part_number(meta.key) is None:
                continue
            try:
                record = decode_part(self._store.get(meta.key), meta.key)
            except NotFound:
                continue
            if meta.modified_ns - record.stored_ns <= self._recorded_ns:
                yield Part(record, meta.key)

    def under_way(self, branch_uuid: str) -> Iterator[tuple[str, UploadRecord]]:
        """Yield (id, record) of the uploads that can be gone on with."""
        prefix = layout.uploads_prefix(self._disk_id, branch_uuid)
        ended: set[str] = set()
        begun: list[str] = []
        for meta in self._store.list(prefix):
            upload_id, _, what = meta.key[len(prefix) :].partition("/")
            if what == "begin":
                begun.append(upload_id)
            elif what == "end":
                ended.add(upload_id)
        for upload_id in begun:
            if upload_id not in ended:
                try:
                    yield upload_id, self.get(branch_uuid, upload_id)
                except NoUpload:
                    continue

    def finish(
        self, branch_uuid: str, upload_id: str, etag: str, path: bytes = b"", checksum: tuple[str, ...] = ()
    ) -> None:
        """End an upload: completed as such an object, or (`etag` empty) aborted. Ended before is fine.

        The parts of an aborted one stay until a collection: a commit of them may be on its way.
        """
        key = layout.upload_end_key(self._disk_id, branch_uuid, upload_id)
        end = UploadEnd(etag, self._runtime.now_ns(), self._runtime.token_bytes(8), path, checksum)
        try:
            create_record(self._store, key, encode_end(end), "it has ended", self._runtime)
        except Exists:
            return
        if etag:
            prefix = layout.upload_prefix(self._disk_id, branch_uuid, upload_id)
            rest = [meta.key for meta in self._store.list(prefix) if meta.key != key]
            for start in range(0, len(rest), _DELETE_BATCH):
                self._store.delete(rest[start : start + _DELETE_BATCH])

    def _load(self, branch_uuid: str, upload_id: str) -> UploadRecord:
        if _UPLOAD_ID.fullmatch(upload_id) is not None:
            key = layout.upload_begin_key(self._disk_id, branch_uuid, upload_id)
            try:
                return decode_upload(self._store.get(key), key)
            except NotFound:
                pass
        raise NoUpload(f"there is no upload {upload_id!r}")

    def _require_young(self, record: UploadRecord, upload_id: str) -> None:
        if self._runtime.now_ns() - record.created_ns > UPLOAD_S * 1e9:
            raise NoUpload(f"the upload {upload_id!r} was begun more than {UPLOAD_S / 86_400:g} days ago")
