"""Rows of columnar files as plain values: Parquet, Arrow, and folders that `datasets.save_to_disk` wrote.

pyarrow is imported with the first table. One batch of rows is in memory at a time. A table can be read from any row on;
earlier rows of its row group are read and dropped.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from lengthwise.core.errors import DataError

ZSTANDARD = b"\x28\xb5\x2f\xfd"
PARQUET, ARROW_FILE, ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_BATCH = 256  # rows per batch of plain values
_STATE = "state.json"  # lists the files of a saved dataset


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets.save_to_disk` wrote the folder."""
    return any(os.path.isfile(folder / name) for name in (_STATE, "dataset_dict.json"))


def saved_files(folder: Path) -> list[Path]:
    """Return the Arrow files of a saved dataset, in order.

    Raises DataError for several splits in one folder, and for a list of files that is unreadable or leads elsewhere.
    """
    where = str(folder)
    if not os.path.isfile(folder / _STATE):
        remedy = "Name each as a source of its own, with its path: FOLDER/train."
        raise DataError(where, expected="one split of a saved dataset", got="a folder of several", remedy=remedy)
    try:
        state = json.loads((folder / _STATE).read_bytes())
        names = [each["filename"] for each in state["_data_files"]]
        wrong = [name for name in names if Path(name).name != name] or state.get("_indices_data_files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        got = f"{_STATE} with {type(error).__name__}: {str(error)[:100]}"
        raise DataError(where, expected="a saved dataset", got=got, remedy="Save it again.") from None
    if wrong:
        got, remedy = f"{wrong}", "Save it again, after flatten_indices()."
        raise DataError(where, expected="a dataset with all its rows in order in its folder", got=got, remedy=remedy)
    return [folder / name for name in names]


def table_batches(file: BufferedReader, head: bytes, where: str, first: int = 0) -> Iterator[tuple[bytes, int, float]]:
    """Yield (Arrow stream of some rows, their number, share of the file read so far), from row `first` on.

    Raises DataError for a file that is broken, ends early, or has no rows.
    """
    import pyarrow as pa

    row = first
    try:
        for batch, share in _batches(file, head, first):
            for start in range(0, batch.num_rows, _BATCH):
                rows = batch.slice(start, _BATCH)
                row += rows.num_rows
                yield _streamed(rows), rows.num_rows, share
    except (pa.ArrowException, OSError) as error:
        got = f"{' '.join(str(error).split())[:200]}, after row {row}"
        raise DataError(where, expected="a whole file", got=got, remedy="Write or copy it again.") from None
    if not row:
        raise DataError(where, expected="rows", got="a table of none", remedy="Take it out of {data|`data`}.")


def _streamed(batch: Any) -> bytes:
    import pyarrow as pa

    found = pa.BufferOutputStream()
    with pa.ipc.new_stream(found, batch.schema) as out:
        out.write_batch(batch)
    return found.getvalue().to_pybytes()


def rows_of_table(content: bytes, where: str, first: int) -> Iterator[dict[str, Any] | DataError]:
    """Yield the rows of an Arrow stream as values by column; an error for a row that is no UTF-8.

    first: number of its first row in the file, from 1.
    """
    import pyarrow as pa

    for batch in pa.ipc.open_stream(content):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:  # find the row that is no text, the slow way
            for row in range(batch.num_rows):
                yield row_of(batch, row, f"{where}:{first + row}")


def mapped_batches(file: BufferedReader, where: str) -> list[Any]:
    """Return all batches of an open table, mapped; Parquet is first copied to a temporary Arrow file.

    Raises DataError for a file that is broken or has no rows.
    """
    import pyarrow as pa
    from pyarrow import parquet

    head, found = file.peek(8)[:8], []
    try:
        if not head.startswith(PARQUET):
            found = [batch for batch, _ in _batches(file, head, 0)]
        else:
            table = parquet.ParquetFile(file)
            with room_for_a_copy(), tempfile.NamedTemporaryFile() as plain:  # the mapping keeps the file
                with pa.ipc.new_stream(pa.PythonFile(plain, "w"), table.schema_arrow) as out:
                    for batch in table.iter_batches(_BATCH):
                        out.write_batch(batch)
                plain.flush()
                found = [*pa.ipc.open_stream(pa.memory_map(plain.name))]
    except (pa.ArrowException, OSError) as error:
        got = " ".join(str(error).split())[:200]
        raise DataError(where, expected="a whole file", got=got, remedy="Write or copy it again.") from None
    if not found:
        raise DataError(where, expected="rows", got="a table of none", remedy="Take it out of {data|`data`}.")
    file.seek(0)
    return found


@contextmanager
def room_for_a_copy() -> Iterator[None]:
    """Translate a full disk inside the block to a DataError that names the temporary folder."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where, expected = tempfile.gettempdir(), "a folder with room for an unpacked copy of a file of data"
        remedy = "Make room there, or name another folder with TMPDIR."
        raise DataError(where, expected=expected, got=error.strerror or str(error), remedy=remedy) from None


def row_of(batch: Any, place: int, where: str) -> dict[str, Any] | DataError:
    """Return a row of a batch as values by column, or an error if it is no UTF-8. where: its name in the error."""
    try:
        return batch.slice(place, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        got = f"byte {error.object[error.start]:#04x} at byte offset {error.start} of its text"
        return DataError(where, expected="UTF-8", got=got, remedy="Correct the row.")


@contextmanager
def unpacked(file: BufferedReader, where: str) -> Iterator[BufferedReader]:
    """Unpack an open Zstandard file; DataError if it is broken or cut."""
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(file, "zstd") as packed:
            yield BufferedReader(packed)
    except OSError as error:
        got = " ".join(str(error).split())[:200]
        raise DataError(where, expected="a whole file of Zstandard", got=got, remedy="Copy it again.") from None


def _batches(file: BufferedReader, head: bytes, first: int) -> Iterator[tuple[Any, float]]:
    """Yield (batch, share of the file read so far) from row `first` on."""
    row, batches, share = _batches_from(file, head, first)
    for number, batch in enumerate(batches, start=1):
        begin = max(first - row, 0)
        row += batch.num_rows
        if begin < batch.num_rows:
            yield batch.slice(begin), share(row, number)


def _batches_from(file: BufferedReader, head: bytes, first: int) -> tuple[int, Iterator[Any], Callable[..., float]]:
    """Return (row of the first batch, batches from at or before row `first` on, share of the file).

    The share is a function of (row, batch).
    """
    import pyarrow as pa
    from pyarrow import parquet

    if head.startswith(PARQUET):
        table, group, row = parquet.ParquetFile(file), 0, 0
        while group < table.num_row_groups and row + table.metadata.row_group(group).num_rows <= first:
            row += table.metadata.row_group(group).num_rows
            group += 1
        groups = range(group, table.num_row_groups)  # one by one: batches then begin alike for every `first`
        batches = (batch for each in groups for batch in table.iter_batches(_BATCH, row_groups=[each]))
        return row, batches, lambda row, _number: row / table.metadata.num_rows
    mapped = pa.memory_map(file.name)
    if head.startswith(ARROW_FILE):
        reader = pa.ipc.open_file(mapped)
        number = reader.num_record_batches
        return 0, map(reader.get_batch, range(number)), lambda _row, batch: batch / number
    return 0, iter(pa.ipc.open_stream(mapped)), lambda _row, _number: mapped.tell() / mapped.size()
