"""`lengthwise prepare`: tokenize once, into a folder that a run file names as any other source of data."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.core.errors import Collector, ConfigError, raise_problems
from lengthwise.core.sizes import parse_tokens, read_whole
from lengthwise.report.figures import count, percent, seconds
from lengthwise.report.progress import LiveLine

if TYPE_CHECKING:
    from lengthwise.config import DataSource
    from lengthwise.data.manifest import Manifest
    from lengthwise.data.prepare import Progress

_MOST_WORKERS = 1024
_BAR = 20  # characters
_RUN_FILES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenize the data of a run file, or files and folders, into a folder; or verify every byte of such a folder.

    A run file then names the folder: `data: [{path: FOLDER}]`. Interrupted or killed, the same command goes on with
    what is there.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN.yaml|FILE...")]
    """A run file, for its data and tokenizer; or files and folders of data; with --verify folders of prepared data."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where the prepared data goes: a new folder."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="")] = None
    """The tokenizer of files that are named here: bytes, a Hugging Face folder or hub name."""
    max_tokens: Annotated[str | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The longest row of files that are named here, 8192 or 8K; default: no limit."""
    too_long: Annotated[Literal["error", "skip"], tyro.conf.arg(metavar="error|skip")] = "error"
    """What happens to a row of more than --max-tokens."""
    empty: Annotated[Literal["error", "skip"], tyro.conf.arg(metavar="error|skip")] = "error"
    """What happens to an empty row or file."""
    eval: tyro.conf.FlagCreatePairsOff[bool] = False
    """Prepare the run file's eval data."""
    set: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(name="set", metavar="a.b=value [a.b=value ...]"),
    ] = ()
    """Change a key of the run file: --set data.0.max_tokens=8192"""
    workers: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Processes that tokenize; default: one a core."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace prepared data of other sources or settings in --out."""
    verify: tyro.conf.FlagCreatePairsOff[bool] = False
    """Read every byte of prepared data and compare it with what was written; exits with 1 where it differs."""

    def run(self) -> int:
        """Run the command; return the exit status."""
        if self.verify:
            return self._verify()
        problems = Collector()
        problems.attempt(lambda: self.workers is None or read_whole("workers", self.workers, most=_MOST_WORKERS))
        if self.out is None:
            problems.add(ConfigError("--out", expected="a folder", got="none", remedy="Add --out FOLDER."))
        asked = problems.attempt(self._asked)
        problems.raise_all()
        assert asked is not None, "what was asked for is known"
        assert self.out is not None, "checked before"
        return self._prepare(*asked, self.out)

    def names(self) -> dict[str, str]:
        """Map names of the library to what the user typed for them."""
        names = named_alike("workers overwrite out")
        if self._is_run_file:
            return names
        return names | {"tokenizer": "--tokenizer", "skip_empty": "add --empty skip"}

    @property
    def _is_run_file(self) -> bool:
        return len(self.inputs) == 1 and self.inputs[0].suffix in _RUN_FILES

    def _asked(self) -> tuple[tuple[DataSource, ...], str, str]:
        """Return the sources, the tokenizer's name and the key that messages call the sources by."""
        from lengthwise.config import load_config

        if not self.inputs:
            remedy = "Name a run file, or files of data."
            raise ConfigError("FILE", expected="a run file or files of data", got="none", remedy=remedy)
        of_files = {
            "--tokenizer": self.tokenizer is not None,
            "--max-tokens": self.max_tokens is not None,
            "--too-long": self.too_long != "error",
            "--empty": self.empty != "error",
        }
        if not self._is_run_file:
            return self._of_files()
        problems = [
            ConfigError(name, expected="none beside a run file", got="one", remedy="Use --set, or change the file.")
            for name, given in of_files.items()
            if given
        ]
        raise_problems(problems)
        config = load_config(self.inputs[0], [each for group in self.set for each in group])
        if not self.eval:
            return config.data, config.tokenizer_name, "data"
        if config.eval is None:
            remedy = "Add eval to the run file, or leave out --eval."
            raise ConfigError("--eval", expected="a run file with eval", got="none", remedy=remedy)
        return config.eval.data, config.tokenizer_name, "eval.data"

    def _of_files(self) -> tuple[tuple[DataSource, ...], str, str]:
        from lengthwise.config import DataSource

        problems = Collector()
        for name, given in {"--eval": self.eval, "--set": bool(self.set)}.items():
            if given:
                remedy = "Name a run file (.yaml), or leave it out."
                problems.add(ConfigError(name, expected="a run file", got="files of data", remedy=remedy))
        if self.tokenizer is None:
            remedy = "Add --tokenizer NAME: bytes, a folder, or a hub name."
            problems.add(ConfigError("--tokenizer", expected="a tokenizer", got="none", remedy=remedy))
        for path in self.inputs:
            if not path.is_file() and not path.is_dir():
                got, remedy = f"{path}: nothing there", "Correct the path."
                problems.add(ConfigError("FILE", expected="an existing file or folder", got=got, remedy=remedy))
        most = problems.attempt(lambda: parse_tokens(self.max_tokens, "--max-tokens") if self.max_tokens else None)
        if self.too_long == "skip" and self.max_tokens is None:
            remedy = "Add it, or leave out --too-long."
            problems.add(ConfigError("--too-long", expected="--max-tokens beside it", got="none", remedy=remedy))
        problems.raise_all()
        settings = {"max_tokens": most, "too_long": self.too_long, "empty": self.empty}
        sources = [DataSource.model_validate({"path": path.absolute(), **settings}) for path in self.inputs]
        assert self.tokenizer is not None, "checked before"
        name = self.tokenizer
        local = str(Path(name).absolute()) if Path(name).is_dir() else name
        return tuple(sources), local, "FILE"

    def _prepare(self, sources: tuple[DataSource, ...], tokenizer: str, key: str, out: Path) -> int:
        from lengthwise.data import load_tokenizer
        from lengthwise.data.prepare import prepare_store
        from lengthwise.training.workers import usable_cores, worker_processes

        line = LiveLine(sys.stdout)
        load = functools.cache(functools.partial(load_tokenizer, tokenizer))
        if tokenizer != "bytes":
            Collector().attempt(
                load
            )  # before processes are forked, which then have it; whether it is needed, rows tell
        with worker_processes(self.workers or usable_cores()) as run:
            manifest, was_there = prepare_store(
                sources,
                out,
                tokenizer_name=tokenizer,
                tokenizer=load,
                key=key,
                run=run,
                on_progress=progress_line(line),
                overwrite=self.overwrite,
            )
        line.write(("already prepared, the same: " if was_there else "prepared  ") + told(manifest, out))
        return 0

    def _verify(self) -> int:
        from lengthwise.data.store import broken_files, check_store

        if not self.inputs:
            remedy = "Name what `lengthwise prepare` wrote."
            raise ConfigError("FILE", expected="folders of prepared data", got="none", remedy=remedy)
        bad = 0
        for folder in self.inputs:
            manifest, line = check_store(folder), LiveLine(sys.stdout)
            done, whole = 0, sum(each.num_bytes for each in manifest.files.values())

            def on_file(num_bytes: int, line: LiveLine = line, whole: int = whole) -> None:
                nonlocal done
                done += num_bytes
                line.update(f"verifying {percent(done / max(1, whole))} of {count(whole)}B")

            wrong = broken_files(folder, manifest, on_file)
            bad += bool(wrong)
            line.write(f"{folder}: {'NOT what was prepared' if wrong else 'whole'}; every byte was read")
            for each in wrong:
                line.write(str(each))
        return int(bad > 0)


def progress_line(line: LiveLine) -> Callable[[Progress], None]:
    """Return what shows how far a preparation is, and how long it will still take."""
    start = time.monotonic()
    before: list[Progress] = []

    def show(now: Progress) -> None:
        before.append(now) if not before else None
        found, spent = before[0], time.monotonic() - start
        share = now.bytes_done / max(1, now.num_bytes)
        bar = "#" * round(_BAR * share)
        shards = f"{now.shards_done} of {now.num_shards} shards"
        text = f"[{bar:.<{_BAR}}] {percent(share)}, {shards}, {count(now.tokens)} tokens"
        if now is found and found.shards_found:
            text += f" of an earlier try ({found.shards_found} shards)"
        new_bytes = now.bytes_done - found.bytes_done
        if new_bytes and spent:
            left = spent * (now.num_bytes - now.bytes_done) / new_bytes
            rate = (now.tokens - found.tokens) / spent
            text += f", {count(rate)} tokens/s, {seconds(left)} left" if left else f", {count(rate)} tokens/s"
        line.update(text)

    return show


def told(manifest: Manifest, out: Path) -> str:
    """Say in a line what a store holds."""
    left_out = "".join(f", {number} left out ({reason})" for reason, number in manifest.skipped.items())
    tokenizer = "" if manifest.tokenizer is None else f" of {manifest.tokenizer.name}"
    rows = manifest.rows - sum(manifest.skipped.values())
    return (
        f"{rows} sequences, {count(manifest.tokens)} tokens{tokenizer}, {count(manifest.loss_tokens)} with a loss"
        f"{left_out}; data: [{{path: {out}}}]"
    )
