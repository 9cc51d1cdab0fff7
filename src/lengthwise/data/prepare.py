"""Tokenize once: sources to a store (`store`), shard by shard, in as many processes as the caller runs.

Work goes on in `OUT.unfinished`, which is renamed when all of it is on the disk. What a killed process leaves there is
gone on with: shards that are whole stay, provided that sources, settings and tokenizer are what they were. The store of
a second try is that of one that was never killed, byte for byte.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core import __version__
from lengthwise.core.errors import ConfigError, DataError, OutputError
from lengthwise.core.files import sync, try_lock
from lengthwise.data import store
from lengthwise.data.digests import digest_of_rows, file_digest
from lengthwise.data.manifest import NAME, Manifest, Shard, StoredFile, StoredRows, UsedTokenizer, read_manifest
from lengthwise.data.progress import Progress
from lengthwise.data.refusals import Refusals
from lengthwise.data.shard_writer import (
    ROW_RECORD,
    WORK,
    ShardTask,
    WrittenShard,
    find_shard,
    rows_path,
    tokens_name,
    write_shard,
)
from lengthwise.data.shards import Piece, Runner, ToPrepare, plan_shards
from lengthwise.data.sources import printable_name
from lengthwise.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lengthwise.config import DataSource

_PLAN = "plan.json"


def prepare_store(
    sources: Sequence[DataSource],
    out: Path,
    *,
    tokenizer_name: str,
    tokenizer: Callable[[], Tokenizer],
    keys: Sequence[str] | None = None,
    run: Runner = map,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    overwrite: bool = False,
    vocab_size: int | None = None,
    **cutting: int,
) -> tuple[Manifest, bool]:
    """Prepare sources into the folder `out`; return its manifest, and whether it was there already, the same.

    `run` calls functions in other processes; the default calls them here. `tokenizer` loads the one of that name.
    `keys`: the config path of each source, for messages; None: data.0 and so on. `vocab_size`: rows with larger ids are
    bad; None: with none. `cutting`: `least_bytes` of `plan_shards`.

    Raises:
        LengthwiseError: sources that cannot be read, all bad rows together; a folder that holds something else, is
            being written by another process, or cannot be written.
    """
    out = Path(os.path.abspath(out))
    keys = [f"data.{number}" for number in range(len(sources))] if keys is None else keys
    plan = plan_shards(
        sources,
        keys=keys,
        tokenizer=_used(tokenizer_name, tokenizer),
        tokenizer_name=tokenizer_name,
        run=run,
        vocab_size=vocab_size,
        **cutting,
    )
    if _is_there(out, plan, overwrite=overwrite):
        return read_manifest(out), True
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = out.parent / f".{out.name}.lock"
        held = try_lock(lock)
        if isinstance(held, str):
            expected, got = "a folder that nobody else prepares", f"one that {held} is writing"
            raise OutputError(str(out), expected=expected, got=got, remedy="Wait for its end, or choose another.")
        try:
            manifest = _prepare(plan, out, run, on_progress)
        finally:
            lock.unlink(missing_ok=True)
            held.close()
    except OSError as error:
        got = f"{error.strerror or error} at {error.filename or out}"
        remedy = "Make room or choose another folder; the same command then continues with what is prepared."
        raise OutputError(str(out), expected="a folder to write into", got=got, remedy=remedy) from None
    return manifest, False


def _used(name: str, tokenizer: Callable[[], Tokenizer]) -> UsedTokenizer | None:
    """Return the digests of the tokenizer; None where it does not load, which is told when a text is met."""
    try:
        loaded = tokenizer()
    except ConfigError:
        return None
    return UsedTokenizer(name=name, digest=loaded.digest(), template=loaded.template_digest())


def _is_there(out: Path, plan: ToPrepare, *, overwrite: bool) -> bool:
    """Return whether the same store is there, whole; OutputError for anything else, unless it may be overwritten."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / NAME).is_file():
        got, remedy = "another folder or file", "Choose a folder that is not there."
        raise OutputError(str(out), expected="a new folder, or a store", got=got, remedy=remedy)
    try:
        if store.check_store(out).plan == plan.digest():
            return True
        got = "a store of other data, settings or tokenizer"
    except DataError as error:
        got = f"a damaged store ({error.where}: {error.got})"
    if not overwrite:
        remedy = "Choose another folder, or give {overwrite} to replace it."
        raise OutputError(str(out), expected="a new folder, or the same store", got=got, remedy=remedy)
    return False


def _prepare(plan: ToPrepare, out: Path, run: Runner, on_progress: Callable[[Progress], None]) -> Manifest:
    folder = out.with_name(out.name + store.UNFINISHED)
    if not _goes_on(folder, plan):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / WORK).mkdir(parents=True)
        text = folder / WORK / f"{_PLAN}.tmp"
        text.write_text(plan.to_json(), encoding="utf-8")
        sync(text)
        text.replace(folder / WORK / _PLAN)
    if not (folder / NAME).is_file():
        _write_whole(folder, plan, _write_shards(folder, plan, run, on_progress))
    manifest = read_manifest(folder)
    shutil.rmtree(folder / WORK, ignore_errors=True)
    sync(folder)
    if out.exists():
        shutil.rmtree(out) if any(out.iterdir()) else out.rmdir()
    folder.rename(out)
    sync(out.parent)
    return manifest


def _goes_on(folder: Path, plan: ToPrepare) -> bool:
    """Return whether an earlier process began just this."""
    try:
        if (folder / NAME).is_file():
            return read_manifest(folder).plan == plan.digest()
        return (folder / WORK / _PLAN).read_text(encoding="utf-8") == plan.to_json()
    except (OSError, UnicodeDecodeError, DataError):
        return False


def _write_shards(
    folder: Path, plan: ToPrepare, run: Runner, on_progress: Callable[[Progress], None]
) -> list[WrittenShard]:
    found = {number: shard for number in range(len(plan.shards)) if (shard := find_shard(folder, number))}
    num_found, refused = len(found), dict[int, Refusals]()
    num_bytes = [sum(_bytes(piece) for piece in shard) for shard in plan.shards]

    def tell() -> None:
        done = list(found)
        on_progress(
            Progress(
                shards_done=len(done) + len(refused),
                shards_found=num_found,
                num_shards=len(plan.shards),
                bytes_done=sum(num_bytes[number] for number in (*done, *refused)),
                num_bytes=sum(num_bytes),
                rows=sum(each.rows for each in found.values()),
                tokens=sum(each.tokens for each in found.values()),
            )
        )

    tell()
    tasks = [
        ShardTask(
            number=number,
            folder=folder,
            pieces=pieces,
            sources=plan.sources,
            tokenizer_name=plan.tokenizer_name,
            keys=plan.keys,
            vocab_size=plan.vocab_size,
        )
        for number, pieces in enumerate(plan.shards)
        if number not in found
    ]
    for number, shard, refusals in run(write_shard, tasks):
        if shard is None:
            refused[number] = refusals
        else:
            found[number] = shard
        tell()
    together = Refusals()
    for _, refusals in sorted(refused.items()):
        together.merge(refusals)
    together.raise_all(_together(plan))
    return [found[number] for number in range(len(plan.shards))]


def _together(plan: ToPrepare) -> str:
    """Return what messages call all sources: `data` of data.0 and data.1, the key of a single one."""
    return plan.keys[0] if len(plan.keys) == 1 else plan.keys[0].rpartition(".")[0]


def _bytes(piece: Piece) -> int:
    part = piece.rows.part
    return part.stop - part.start if part is not None else sum(each.num_bytes for each in piece.files)


def _write_whole(folder: Path, plan: ToPrepare, shards: Sequence[WrittenShard]) -> None:
    """Write what is of all rows together, and the manifest last."""
    rows = sum(each.rows for each in shards)
    skipped = sum((Counter(each.skipped) for each in shards), Counter())
    if rows == sum(skipped.values()):
        left_out = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        got, remedy = f"none (left out: {left_out or 'nothing'})", "Add rows, or raise max_tokens."
        raise DataError(_together(plan), expected="at least one sequence", got=got, remedy=remedy)
    weighed = (store.WEIGHTS,) if any(each.weights for each in shards) else ()
    data = _write_tables(folder, len(shards), weighed=bool(weighed))
    with (folder / store.FILES).open("w", encoding="utf-8") as file:
        for (_, listing), group in zip(plan.listings, plan.files, strict=True):
            names = [printable_name(each.path) for each in group] if listing.names is None else listing.names
            for name, each in zip(names, group, strict=True):
                values = {"path": printable_name(name), "num_bytes": each.num_bytes, "sha256": each.sha256}
                file.write(json.dumps(values) + "\n")
    files = {
        name: StoredFile(num_bytes=(folder / name).stat().st_size, sha256=file_digest(folder / name))
        for name in (store.LENGTHS, store.OFFSETS, store.LOSSES, *weighed, store.DIGESTS, store.FILES)
    }
    for number, each in enumerate(shards):
        files[tokens_name(number)] = StoredFile(num_bytes=each.num_bytes, sha256=each.sha256)
    firsts = np.cumsum([0, *(each.rows for each in shards)]).tolist()
    fullest = max(range(len(shards)), key=lambda number: shards[number].largest_id)
    kinds = sum((Counter(each.kinds) for each in shards), Counter())
    texts = any(kinds[kind] for kind in kinds if kind != "ids")
    manifest = Manifest(
        version=__version__,
        encoding=store.ENCODING,
        plan=plan.digest(),
        data=data.hex(),
        rows=rows,
        tokens=sum(each.tokens for each in shards),
        loss_tokens=sum(each.loss_tokens for each in shards),
        largest_id=shards[fullest].largest_id,
        largest_id_row=firsts[fullest] + shards[fullest].largest_id_row,
        kinds=dict(sorted(kinds.items())),
        skipped=dict(sorted(skipped.items())),
        tokenizer=plan.tokenizer if texts else None,
        sources=tuple(plan.settings()),
        origins=_origins(plan, shards),
        shards=tuple(
            Shard(
                file=tokens_name(number),
                rows=each.rows,
                tokens=each.tokens,
                labels=each.labels,
                weights=each.weights,
            )
            for number, each in enumerate(shards)
        ),
        files=files,
    )
    for name in files:
        sync(folder / name)
    unfinished = folder / WORK / f"{NAME}.tmp"
    unfinished.write_text(manifest.to_json(), encoding="utf-8")
    sync(unfinished)
    sync(folder)
    unfinished.replace(folder / NAME)
    sync(folder)


def _write_tables(folder: Path, num_shards: int, *, weighed: bool) -> bytes:
    """Write what is to be known of each row, one shard's at a time; return the digest of all rows."""
    end = 0
    with (
        (folder / store.LENGTHS).open("wb") as lengths,
        (folder / store.OFFSETS).open("wb") as offsets,
        (folder / store.LOSSES).open("wb") as losses,
        (folder / store.WEIGHTS).open("wb") if weighed else nullcontext() as weights,
        (folder / store.DIGESTS).open("wb") as digests,
    ):
        offsets.write(np.zeros(1, dtype="<i8").tobytes())
        for number in range(num_shards):
            rows = np.fromfile(rows_path(folder, number), dtype=ROW_RECORD)
            lengths.write(rows["length"].tobytes())
            offsets.write((end + np.cumsum(rows["length"])).astype("<i8").tobytes())
            losses.write(rows["losses"].tobytes())
            digests.write(rows["digest"].tobytes())
            if weights is not None:
                weights.write(rows["weights"].tobytes())
            end += int(rows["length"].sum())
    stored = np.fromfile(folder / store.DIGESTS, dtype=np.uint8) if end else np.empty(0, dtype=np.uint8)
    return digest_of_rows([stored])


def _origins(plan: ToPrepare, shards: Sequence[WrittenShard]) -> tuple[StoredRows, ...]:
    rows = Counter[int]()
    for pieces, shard in zip(plan.shards, shards, strict=True):
        for piece, number in zip(pieces, shard.piece_rows, strict=True):
            rows[piece.listing] += number
    found, first_row, first_file = list[StoredRows](), 0, 0
    for number, ((source, listing), group) in enumerate(zip(plan.listings, plan.files, strict=True)):
        found.append(
            StoredRows(
                source=source,
                label=listing.label,
                first_row=first_row,
                first_file=first_file,
                files=len(group),
                documents=listing.names is not None,
            )
        )
        first_row, first_file = first_row + rows[number], first_file + len(group)
    return tuple(found)
