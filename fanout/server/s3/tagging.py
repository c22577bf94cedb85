"""Tags of objects: up to ten names and values that are kept with an object's headers.

Owns their three operations; described.py has their rules, as they can come with a Put, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import parse_qsl

import msgspec

from fanout.disk.merge import Intent
from fanout.disk.paths import shown
from fanout.disk.state import State as Tree
from fanout.format.facts import Facts, facts_of, with_facts
from fanout.server.s3.call import Call
from fanout.server.s3.checksums import claimed_checksum
from fanout.server.s3.described import TAGGING, checked_tags
from fanout.server.s3.documents import child, children, document, parse_xml, text
from fanout.server.s3.errors import S3Error
from fanout.server.s3.reading import find
from fanout.server.s3.request import Reply, check_key

__all__ = ["delete", "get", "put"]

_BODY_BYTES = 64 << 10
Tags = list[tuple[str, str]]


def _kept(facts: Facts | None) -> Tags:
    kept = next((value for name, value in facts.headers if name == TAGGING), "") if facts is not None else ""
    return parse_qsl(kept, keep_blank_values=True)


async def get(call: Call) -> Reply:
    call.require_version()

    def work() -> Reply:
        _, node = find(call, check_key(call.request.key, write=False))
        told = [f"<Tag>{text('Key', name)}{text('Value', value)}</Tag>" for name, value in _kept(facts_of(node))]
        return Reply(200, [], document("Tagging", f"<TagSet>{''.join(told)}</TagSet>"))

    reply: Reply = await call.threads(work)
    return reply


async def put(call: Call) -> Reply:
    call.require_version()
    data = await call.body(_BODY_BYTES).read(call.threads, claimed_checksum(call.headers))
    found = parse_xml(data, "Tagging").find("TagSet")
    if found is None:
        raise S3Error("MalformedXML")
    tags = [(child(item, "Key") or "", child(item, "Value") or "") for item in children(found, "Tag")]
    return await _replace(call, checked_tags(tags), 200)


async def delete(call: Call) -> Reply:
    call.require_version()
    return await _replace(call, "", 204)


async def _replace(call: Call, kept: str, status: int) -> Reply:
    key = check_key(call.request.key, write=False)
    call.disk.writable(call.point)
    await call.threads(lambda: call.commit(partial(_plan, call, key, kept), f"tag {shown(key)}"))
    return Reply(status)


def _plan(call: Call, key: bytes, kept: str, tree: Tree) -> Sequence[Intent]:
    _, node = find(call, key, tree)
    facts = facts_of(node) or Facts()
    headers = [each for each in facts.headers if each[0] != TAGGING]
    if kept:
        headers.append((TAGGING, kept))
    changed = with_facts(node, msgspec.structs.replace(facts, headers=tuple(sorted(headers))))
    return [Intent(key.removesuffix(b"/"), node, changed)]
