"""Plan files on disk: JSON, as it is or compressed with gzip, which runs keep theirs in."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from lengthwise.core.disk import MOST_BYTES, read_plain

_GZIP = b"\x1f\x8b"


def compress_plan(text: str) -> bytes:
    """Return a plan's JSON as its run keeps it, in `plans/step-000001.json.gz`; the same text gives the same bytes."""
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def read_plan_text(path: str | Path) -> str:
    """Read the JSON of a plan file.

    Raises:
        OSError: see `read_plain`; broken gzip, or more than a plan can have.
        UnicodeDecodeError: no UTF-8.
    """
    content = read_plain(path)
    if content.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(MOST_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"broken gzip: {error}") from None
        if len(content) > MOST_BYTES:
            raise OSError(f"more than {MOST_BYTES:,} bytes")
    return content.decode()
