"""Kinds of files, by their first bytes or the end of their name: those that are read, and how to convert others."""

from __future__ import annotations

import re
from io import BufferedReader
from pathlib import Path

from lengthwise.core.errors import DataError
from lengthwise.data.tables import ARROW_FILE, ARROW_STREAM, PARQUET, ZSTANDARD

HEAD = 4096  # bytes of a file that show its kind
GZIP = b"\x1f\x8b"
PACKED = (GZIP, ZSTANDARD)  # how packed lines begin
READ = "JSON lines (plain, gzip or Zstandard), Parquet or Arrow"
_OF_ROWS = (PARQUET, ARROW_FILE, ARROW_STREAM, *PACKED)

_SOURCE = "name it as a source of its own."
_LINES = ".to_json('PLAIN.jsonl', orient='records', lines=True)"
_TEXTS = ", dtype=str, keep_default_na=False"  # no cell becomes a number, or null
_CSV = f"""python -c "import pandas; pandas.read_csv('NAME'{_TEXTS}){_LINES}\""""
_TSV = _CSV.replace("'NAME'", r"'NAME', sep='\t'")
_EXCEL = _CSV.replace("read_csv", "read_excel")
_IDS = 'write a row {"input_ids": [...]} a line.'
_DOCUMENTS = f"read it with Megatron's IndexedDataset, and for each of its documents {_IDS}"
_TO_UTF8 = "iconv -f UTF-16 -t UTF-8 NAME > PLAIN.utf-8"
# First bytes of a file that is no text, its kind, and how to convert it.
_BEGINS = (
    (PARQUET, "Parquet", _SOURCE),
    (ARROW_FILE, "Arrow", _SOURCE),
    (ARROW_STREAM, "Arrow", _SOURCE),
    (GZIP, "gzip", "gunzip NAME"),
    (ZSTANDARD, "Zstandard", "unzstd NAME"),
    (b"BZh91AY&SY", "bzip2", "bunzip2 < NAME > PLAIN"),
    (b"\xfd7zXZ\x00", "xz", "unxz < NAME > PLAIN"),
    (b"\x04\x22\x4d\x18", "LZ4", "unlz4 NAME"),
    (b"7z\xbc\xaf\x27\x1c", "7-Zip", "7z x NAME"),
    (b"Rar!\x1a", "RAR", "unrar x NAME"),
    (b"PK\x03\x04", "zip", "unzip NAME"),
    (b"\xd0\xcf\x11\xe0", "Excel or another of Office", _EXCEL),
    (b"Obj\x01", "Avro", "write its rows as Parquet."),
    (b"\x89HDF\r\n", "HDF5", "write its rows as Parquet."),
    (b"\x93NUMPY", "NumPy", _IDS),
    (b"SQLite format 3\x00", "SQLite", "write its rows as Parquet."),
    (b"MMIDIDX\x00\x00", "an index of Megatron-LM", _DOCUMENTS),
    (b"%PDF-", "PDF", "pdftotext NAME PLAIN.txt, then name the folder of it."),
    (b"\xff\xfe", "UTF-16", _TO_UTF8),
    (b"\xfe\xff", "UTF-16", _TO_UTF8),
)
_ENDS = {
    ".csv": ("CSV", _CSV),
    ".tsv": ("TSV", _TSV),
    ".tab": ("TSV", _TSV),
    ".orc": ("ORC", _CSV.replace(f"read_csv('NAME'{_TEXTS})", "read_orc('NAME')")),
    ".bin": ("numbers, as Megatron-LM writes ids", _DOCUMENTS),
    ".pkl": ("pickle", "write its rows as Parquet."),
    ".pickle": ("pickle", "write its rows as Parquet."),
    ".xml": ("XML", "write a row a line."),
    ".html": ("HTML", "write a row a line."),
    ".yaml": ("YAML", "write a row a line."),
    ".yml": ("YAML", "write a row a line."),
    ".txt": ("plain text", "name its folder: there each file is a document."),
    ".md": ("plain text", "name its folder: there each file is a document."),
    ".parquet": ("no Parquet, as its name ends", "write or copy it again."),
    ".arrow": ("no Arrow, as its name ends", "write or copy it again."),
}
_CELL = rb'"?\w[\w .-]*"?'
_HEADERS = (  # first lines of tables by another name
    (re.compile(_CELL + rb"(,%s)+\r?" % _CELL), "CSV", _CSV),
    (re.compile(_CELL + rb"(;%s)+\r?" % _CELL), "CSV", _CSV.replace("'NAME'", "'NAME', sep=';'")),
    (re.compile(_CELL + rb"(\t%s)+\r?" % _CELL), "TSV", _TSV),
)


def check_head(head: bytes, path: Path, shown: str, *, rows: bool) -> None:
    """Raise DataError for a file of another kind, by its first bytes. rows: allow files of rows, else texts alone."""
    for start, kind, remedy in _BEGINS:
        if head.startswith(start) and not (rows and start in _OF_ROWS):
            if kind == "zip" and (path.suffix.lower().startswith(".xls") or b"xl/" in head):
                kind, remedy = "Excel", _EXCEL
            raise _refuse(path, shown, READ if rows else "text", f"a file of {kind}", remedy)


def check_lines(file: BufferedReader, path: Path) -> None:
    """Raise DataError for an open, unpacked file that is no lines of JSON."""
    head, shown = file.peek(HEAD)[:HEAD], str(path).encode("utf-8", "backslashreplace").decode("utf-8")
    begin = head.lstrip()[:1]
    if head[257:262] == b"ustar":
        raise _refuse(path, shown, READ, "a file of tar", "tar -xf NAME")
    if begin == b"[":
        raise _refuse(path, shown, "JSON lines", "a JSON array", "jq -c '.[]' NAME > PLAIN.jsonl")
    ending = Path(re.sub(r"\.(gz|zst)$", "", path.name.lower())).suffix
    if begin not in (b"", b"{") and ending in _ENDS:
        kind, remedy = _ENDS[ending]
        raise _refuse(path, shown, READ, f"a file of {kind}", remedy)
    for header, kind, remedy in _HEADERS:
        if header.fullmatch(head.partition(b"\n")[0]):
            raise _refuse(path, shown, READ, f"a file of {kind}", remedy)


def _refuse(path: Path, shown: str, expected: str, got: str, remedy: str) -> DataError:
    plain = re.sub(r"\.\w+(\.(gz|zst))?$", "", path.name)
    plain = f"{plain}.plain" if path.name in (plain, f"{plain}.jsonl") else plain  # what is converted stays
    remedy = remedy.replace("NAME", path.name).replace("PLAIN", plain)
    return DataError(shown, expected=expected, got=got, remedy=f"Convert it: {remedy}")
