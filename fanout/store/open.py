"""From a store URL to a store.

Owns the syntax of store URLs. Knows nothing of how each store works.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from fanout.errors import Invalid
from fanout.runtime import Runtime, system
from fanout.store.base import Store
from fanout.store.local import LocalStore
from fanout.store.memory import MemoryStore
from fanout.store.wrap import Retrying

__all__ = ["open_store"]

_ALLOWED = "file:///directory, an absolute directory, memory://[name] or s3://bucket[/prefix]"
_MEMORY_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")


def open_store(
    url: str, *, s3_endpoint: str | None = None, s3_region: str | None = None, runtime: Runtime = system
) -> Store:
    """Return the store `url` names; a missing directory is made, a missing bucket is not.

    - `file:///directory` or an absolute path: a `LocalStore`. The first form decodes `%20` and the like.
    - `memory://name`: one `MemoryStore` shared by this process; `memory://` a new one at each call.
    - `s3://bucket/prefix`: an `S3Store` whose reads and replacing puts are retried. `s3_endpoint` defaults to
      FANOUT_S3_ENDPOINT, then AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then AWS itself; `s3_region` and the
      credentials come from where boto3 looks for them.

    Errors: `Invalid` (the URL, or a bucket that is not there), `Denied`, `Unavailable` (naming the endpoint).
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if url.startswith("/"):
            return LocalStore(url, runtime=runtime)
        raise Invalid.argument("store", url, _ALLOWED)
    match scheme:
        case "file" if rest.startswith("/") and "\0" not in unquote(rest):
            return LocalStore(unquote(rest), runtime=runtime)
        case "memory" if _MEMORY_NAME.fullmatch(rest):
            return MemoryStore.named(rest) if rest else MemoryStore(runtime=runtime)
        case "s3":
            from fanout.store.s3 import S3Store  # boto3 takes 0.3 s to import, and is optional

            bucket, _, prefix = rest.partition("/")
            store = S3Store(bucket, prefix, endpoint=s3_endpoint, region=s3_region)
            store.check()
            return Retrying(store, runtime)
    raise Invalid.argument("store", url, _ALLOWED)
