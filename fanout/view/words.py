"""The words of scan files: which a search may skip because no word of theirs can be part of a match.

Owns the file of distinct words beside a scan file, and the program that writes it:

    words   every run of word bytes in the scan file that is three long or more, once, each on a line, in no order

Word bytes are ASCII letters, digits and `_`, and in text whatever is not ASCII. Nothing else may be imported here: the
program runs in an interpreter of its own, as little in the way as possible, and costs about 15 ns for each byte.
"""

import mmap
import os
import sys

__all__ = ["NAME", "PROGRAM", "SHORTEST", "write_words"]

NAME = "words"
PROGRAM = __file__
#: Words shorter than this are left out: they would rule nothing out.
SHORTEST = 3
#: Beyond this share of the scan file its words are not worth having.
_MAX_SHARE = 0.5
_STEP = 1 << 20
_ASCII = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz")


def _table(binary: bool) -> bytes:
    return bytes(byte if byte in _ASCII or (byte >= 128 and not binary) else 32 for byte in range(256))


def write_words(directory: str, binary: bool) -> bool:
    """Write the words of the scan file in a directory, if they are not there; False where there was no need.

    An empty file of words says that they are not worth having.
    """
    target = f"{directory}/{NAME}"
    if os.path.exists(target):
        return False
    with open(f"{directory}/data", "rb") as file:
        size = os.fstat(file.fileno()).st_size
        words = _words(file.fileno(), size, _table(binary)) if size else set()
    joined = b"\n".join(word for word in words if len(word) >= SHORTEST)
    beside = f"{target}.{os.getpid()}"
    with open(beside, "wb") as file:
        file.write(joined + b"\n" if len(joined) <= _MAX_SHARE * size + 100 else b"")
    os.rename(beside, target)
    return True


def _words(fd: int, size: int, table: bytes) -> set[bytes]:
    """Gather a piece at a time, each cut where no word is."""
    words: set[bytes] = set()
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as data:
        rest = b""
        for start in range(0, size, _STEP):
            piece = rest + data[start : start + _STEP].translate(table)
            cut = piece.rfind(b" ") + 1
            rest = piece[cut:]
            words.update(piece[:cut].split())
        words.update(rest.split())
    return words


def main(arguments: list[str]) -> None:
    """Write the words of each directory named; what cannot be read or written is passed over."""
    os.nice(19)
    for argument in arguments:
        kind, _, directory = argument.partition(":")
        try:
            write_words(directory, kind == "binary")
        except OSError:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
