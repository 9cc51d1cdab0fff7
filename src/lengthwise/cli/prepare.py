"""`lengthwise prepare`: tokenize once, into a folder that a run file names as any other source of data."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lengthwise.cli.options import named_alike
from lengthwise.cli.sources import NamedSources, asked_sources, is_run_file
from lengthwise.core.errors import Collector, ConfigError, DataError
from lengthwise.core.sizes import parse_tokens, read_whole
from lengthwise.report.figures import count, percent
from lengthwise.report.progress import LiveLine

if TYPE_CHECKING:
    from lengthwise.data.prepared import Prepared

_MOST_WORKERS = 1024


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Tokenize the data of a run file, or files and folders, into a folder; or verify every byte of such a folder.

    A run file then names the folder: `data: [{path: FOLDER}]`. If the command was interrupted or killed, run it again:
    it continues with what is finished.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN.yaml|FILE...")]
    """A run file, to use its data and tokenizer; or files and folders of data; with --verify, folders of prepared
    data."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """A new folder for the prepared data."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="")] = None
    """The tokenizer for files named on the command line: bytes, a Hugging Face folder or hub name."""
    max_tokens: Annotated[str | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The longest row, in tokens, of files named on the command line, 8192 or 8K; default: no limit."""
    too_long: Annotated[Literal["error", "skip"], tyro.conf.arg(metavar="error|skip")] = "error"
    """What happens to a row of more than --max-tokens."""
    empty: Annotated[Literal["error", "skip"], tyro.conf.arg(metavar="error|skip")] = "error"
    """What happens to an empty row or file."""
    bad_rows: Annotated[Literal["stop", "skip"], tyro.conf.arg(metavar="stop|skip")] = "stop"
    """What happens to a row that cannot be read or encoded."""
    eval: tyro.conf.FlagCreatePairsOff[bool] = False
    """Prepare the run file's eval data."""
    set: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(name="set", metavar="a.b=value [a.b=value ...]"),
    ] = ()
    """Change a key of the run file: --set data.0.max_tokens=8192"""
    workers: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Processes that tokenize; default: one per core."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace data in --out that was prepared from other sources or settings."""
    verify: tyro.conf.FlagCreatePairsOff[bool] = False
    """Read every byte of prepared data and compare it with what was written; exits with 1 on a difference."""

    def run(self) -> int:
        if self.verify:
            return self._verify()
        problems = Collector()
        problems.attempt(lambda: self.workers is None or read_whole("workers", self.workers, most=_MOST_WORKERS))
        if self.out is None:
            problems.add(ConfigError("--out", expected="a folder", got="none", remedy="Add --out FOLDER."))
        named = problems.attempt(self._named)
        problems.raise_all()
        assert named is not None, "the command line was checked"
        assert self.out is not None, "checked before"
        return self._prepare(named, self.out)

    def names(self) -> dict[str, str]:
        names = named_alike("workers overwrite out")
        if is_run_file(self.inputs):
            return names
        return names | {"tokenizer": "--tokenizer", "skip_empty": "add --empty skip", "skip_bad": "add --bad-rows skip"}

    def _named(self) -> NamedSources:
        problems, of_run = Collector(), is_run_file(self.inputs)
        of_files = {
            "--tokenizer": self.tokenizer is not None,
            "--max-tokens": self.max_tokens is not None,
            "--too-long": self.too_long != "error",
            "--empty": self.empty != "error",
            "--bad-rows": self.bad_rows != "stop",
        }
        for name, given in of_files.items():
            if of_run and given:
                remedy = "Use --set, or change the file."
                problems.add(ConfigError(name, expected="none beside a run file", got="one", remedy=remedy))
        for name, given in {"--eval": self.eval, "--set": bool(self.set)}.items():
            if given and not of_run:
                remedy = "Name a run file (.yaml), or leave it out."
                problems.add(ConfigError(name, expected="a run file", got="files of data", remedy=remedy))
        if not of_run and self.tokenizer is None:
            remedy = "Add --tokenizer NAME: bytes, a folder, or a hub name."
            problems.add(ConfigError("--tokenizer", expected="a tokenizer", got="none", remedy=remedy))
        if self.too_long == "skip" and self.max_tokens is None and not of_run:
            remedy = "Add it, or leave out --too-long."
            problems.add(ConfigError("--too-long", expected="--max-tokens beside it", got="none", remedy=remedy))
        most = problems.attempt(lambda: parse_tokens(self.max_tokens, "--max-tokens") if self.max_tokens else None)
        overrides = [each for group in self.set for each in group]
        limits = {"empty": self.empty, "bad_rows": self.bad_rows, "max_tokens": most}
        limits |= {"too_long": self.too_long} if most else {}
        tokenizer = self.tokenizer or "bytes"
        found = problems.attempt(
            lambda: asked_sources(self.inputs, tokenizer, overrides, of_eval=self.eval and of_run, **limits)
        )
        problems.raise_all()
        assert found is not None, "missing data is a problem"
        return found

    def _prepare(self, named: NamedSources, out: Path) -> int:
        from lengthwise.data import load_tokenizer
        from lengthwise.data.prepare import prepare_folder, to_prepare
        from lengthwise.run.workers import usable_cores

        load = functools.cache(functools.partial(load_tokenizer, named.tokenizer))
        try:
            plan = to_prepare(
                named.sources,
                tokenizer_name=named.tokenizer,
                tokenizer=load,
                keys=[f"{named.key}.{number}" for number in range(len(named.sources))],
            )
            assert plan is not None, "no least number of bytes was given"
            processes = self.workers or usable_cores()
            made, was_there = prepare_folder(plan, out, processes=processes, overwrite=self.overwrite)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("what is finished stays; run the same command to continue") from None
        print(("already prepared, the same: " if was_there else "prepared  ") + prepared_line(made, out))
        return 0

    def _verify(self) -> int:
        from lengthwise.data.arrow import wrong_rows
        from lengthwise.data.prepared import read_prepared

        if not self.inputs:
            remedy = "Name what `lengthwise prepare` wrote."
            raise ConfigError("FILE", expected="folders of prepared data", got="none", remedy=remedy)
        bad = 0
        for folder in self.inputs:
            whole, line = max(1, read_prepared(folder).rows), LiveLine(sys.stdout)
            try:
                wrong = list(
                    wrong_rows(
                        folder, lambda row, line=line, whole=whole: line.update(f"verifying {percent(row / whole)}")
                    )
                )
            except DataError as error:
                wrong = [error]
            bad += bool(wrong)
            line.write(f"{folder}: {'NOT what was prepared' if wrong else 'whole'}; every row was read")
            for each in wrong:
                line.write(str(each))
        return int(bad > 0)


def prepared_line(made: Prepared, out: Path) -> str:
    """Return a prepared folder in a line."""
    left_out = "".join(f", {number} left out ({reason})" for reason, number in made.skipped.items())
    tokenizer = "" if made.tokenizer is None else f" of {made.tokenizer.name}"
    rows = made.rows - sum(made.skipped.values())
    return (
        f"{rows} sequences, {count(made.tokens)} tokens{tokenizer}, {count(made.loss_tokens)} with a loss"
        f"{left_out}; data: [{{path: {out}}}]"
    )
