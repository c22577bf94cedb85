"""What an object interface keeps beside a file or directory: S3's ETag, headers and checksums.

Owns the reserved attributes of a node and their encoding. They are in `Node.xattrs`, so that renames, copies, branches
and merges carry them; no mount ever shows them, because only `user.*` attributes are made real. Facts are bound to the
content they were learned of: after any other change of the file they no longer hold.
"""

from __future__ import annotations

import msgspec

from fanout.format.tree import DIR, Node, content_hash

__all__ = ["FACTS", "Facts", "facts_of", "reserved", "with_facts"]

#: Names of attributes that belong to fanout itself begin with this.
_RESERVED = b"fanout."
FACTS = b"fanout.s3"
_BINDING_BYTES = 16


class Facts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What S3 was told of an object.

    `content` is the first 16 bytes of the file's content identity (`content_hash`), empty for a directory. `md5` is of
    the whole content or, where `count` is not 0, of the MD5s of that many parts; empty: not known. `headers` are those
    to give back, lower case. `checksum` is (algorithm, base64 value, FULL_OBJECT or COMPOSITE) or empty. `parts` are
    the sizes and checksum values of a multipart upload's parts.
    """

    content: bytes = b""
    md5: bytes = b""
    count: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    checksum: tuple[str, ...] = ()
    parts: tuple[tuple[int, str], ...] = ()


_decoder = msgspec.msgpack.Decoder(Facts)
_encoder = msgspec.msgpack.Encoder()


def facts_of(node: Node) -> Facts | None:
    """Return what is kept of a node, if it holds for what the node is now; damage counts as nothing kept."""
    for name, value in node.xattrs:
        if name == FACTS:
            try:
                facts = _decoder.decode(value)
            except msgspec.DecodeError:
                return None
            return facts if node.kind == DIR or facts.content == content_hash(node)[:_BINDING_BYTES] else None
    return None


def with_facts(node: Node, facts: Facts | None) -> Node:
    """Return the node with these facts, bound to its content, in place of all reserved attributes it had."""
    others = tuple(each for each in node.xattrs if not each[0].startswith(_RESERVED))
    if facts is not None:
        content = b"" if node.kind == DIR else content_hash(node)[:_BINDING_BYTES]
        held = msgspec.structs.replace(facts, content=content)
        others = tuple(sorted((*others, (FACTS, _encoder.encode(held)))))
    return node if others == node.xattrs else msgspec.structs.replace(node, xattrs=others)


def reserved(node: Node) -> tuple[tuple[bytes, bytes], ...]:
    """Return the attributes of a node that no mount shows and no command can change."""
    return tuple(each for each in node.xattrs if each[0].startswith(_RESERVED))
