"""One process of a race: creates the keys given, in order, and prints those it won.

    racer.py URL ENDPOINT NAME KEY...

Prints `ready`, waits for a line, then races.
"""

from __future__ import annotations

import sys

from fanout.errors import Exists
from fanout.store.open import open_store


def main() -> None:
    url, endpoint, name, *keys = sys.argv[1:]
    store = open_store(url, s3_endpoint=endpoint or None)
    print("ready", flush=True)
    sys.stdin.readline()
    won = []
    for key in keys:
        try:
            store.create(key, name.encode())
        except Exists:
            continue
        won.append(key)
    print(*won, flush=True)


if __name__ == "__main__":
    main()
