"""`lengthwise data`: describe data before training on it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lengthwise.cli.options import PlanChoices, named_alike
from lengthwise.cli.output import plain_console, refuse_unwritable_file, write_atomically
from lengthwise.cli.run_model import trained_of
from lengthwise.cli.simulate_meshes import MeshChoices, compare_ways
from lengthwise.cli.sources import OF_A_STREAM, asked_sources, is_run_file, known_lengths, tokenizers_of, unit_of
from lengthwise.core.errors import Collector, ConfigError, DataError, LengthwiseError, printable
from lengthwise.core.names import counted
from lengthwise.core.sizes import MOST_RANKS, parse_tokens, read_whole
from lengthwise.report.figures import count, percent
from lengthwise.report.histogram import length_histogram, summarize_lengths
from lengthwise.report.html import html_page, html_table, length_chart

if TYPE_CHECKING:
    import numpy as np

    from lengthwise.config import RunConfig
    from lengthwise.data import Dataset, Tokenizer
    from lengthwise.data.survey import Survey
    from lengthwise.simulator import Scenario

_NAMED, _SHOWN_TOKENS, _SHOWN_BAD = 5, 2000, 5
_BATCHES = 4  # simulated batches, as many as `simulate` has by default


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoices:
    """A checked command line. limits: largest tokens of a row, by reason. scenario: the simulated step, if any."""

    limits: dict[str, int]
    scenario: Scenario | None
    batch_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Data:
    """Describe data: lengths, tokens with a loss, copies, bad or too long rows, and one row with its mask.

    The exit status is 2 if a run would refuse the rows.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN.yaml|FILE...")]
    """A run file, to use its data and tokenizer; or files and folders of data, raw or prepared."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="")] = None
    """The tokenizer that counts tokens: bytes (the default; counts four to five times too many for English), or a
    Hugging Face folder or name."""
    context: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """List rows with more tokens than this, for example 128K."""
    capacity: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens that one GPU holds; lists rows with more tokens than all --gpus hold together."""
    row: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The row to show, counted from 1 over all sources; default: the first row in which some tokens have no loss."""
    gpus: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Simulate a step on this many GPUs and show the gain from planning by length; needs --model."""
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME|FOLDER", help_behavior_hint="")] = None
    """The model of the simulated step: a named shape, for example llama-7b, or a Hugging Face folder."""
    hardware: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "h100"
    """The GPUs of the simulated step."""
    batch_tokens: Annotated[str | None, tyro.conf.arg(metavar="TOKENS", help_behavior_hint="")] = None
    """Tokens of the simulated step; default, as for `simulate`: the run file's first batches, or of files 128K a GPU,
    drawn again where there are fewer."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PAGE.html", help_behavior_hint="")] = None
    """Also write this description as an HTML page."""

    def run(self) -> int:
        from lengthwise.data import load_dataset, load_tokenizer
        from lengthwise.data.load import first_rows
        from lengthwise.data.survey import survey
        from lengthwise.data.tokens import BAD, EMPTY

        problems = Collector()
        choices = problems.attempt(partial(self._read, problems))
        found = problems.attempt(partial(asked_sources, self.inputs, self.tokenizer or "bytes"))
        problems.raise_all()
        assert choices is not None, "the command line was checked"
        assert found is not None, "the command line was checked"
        sources = [source.model_copy(update={"empty": "skip", "bad_rows": "skip"}) for source in found.sources]
        used, bad = list[str](), list[DataError]()

        @functools.cache
        def tokenizer() -> Tokenizer:
            used.append(found.tokenizer)
            return load_tokenizer(found.tokenizer)

        known: dict[str, Any] = {"tokenizer": tokenizer, "vocab_size": None}
        if sources[0].streaming:
            read = partial(first_rows, sequences=OF_A_STREAM, **known)
        else:
            read = partial(load_dataset, key=found.key, check_tokenizer=False, **known)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", UserWarning)
            dataset = read(sources, on_bad_row=bad.append)
            kinds = {BAD for each in found.sources if each.bad_rows == "stop"}
            kinds |= {EMPTY for each in found.sources if each.empty == "error"}
            refused = _refused(partial(read, found.sources)) if kinds & dataset.skipped.keys() else []
        tokenizers = tokenizers_of(used, sources)
        facts = survey(dataset, longest=_NAMED)
        decoding = load_tokenizer(tokenizers[0]) if len(tokenizers) == 1 else None
        heading = _heading(facts, unit_of(tokenizers))
        lines = [
            *([f"stream  its first {len(dataset.ids):,} sequences"] if sources[0].streaming else []),
            *(_refused_lines(refused, self.names()) if refused else _bad_lines(bad)),
            *(f"note    {each.message}" for each in noted if each.category is UserWarning),
            *_loss_lines(dataset, facts),
            *_copy_lines(dataset, facts),
            *(line for what, limit in choices.limits.items() for line in _fit_lines(dataset, what, limit)),
        ]
        longest = [("longest rows", "tokens"), *((dataset.name(i), f"{dataset.lengths[i]:,}") for i in facts.longest)]
        sample = list(self._sample(dataset, decoding))
        simulated = _simulated(choices, dataset, tokenizers, found.config) if choices.scenario is not None else ""
        console = plain_console()
        parts = [heading, *lines, "", *length_histogram(facts.lengths), ""]
        parts += [f"{name:<40}{tokens:>12}" for name, tokens in longest]
        parts += ["", *sample, *(["", simulated] if simulated else [])]
        for part in parts:
            console.print(printable(part))
        if self.out is not None:
            page = data_page(heading, [*lines, simulated] if simulated else lines, facts.lengths, longest, sample)
            write_atomically(self.out, page)
            console.print(f"written to {self.out}")
        return DataError.exit_status if refused else 0

    def names(self) -> dict[str, str]:
        others = {"ranks": "--gpus", "capacity_tokens": "--capacity", "data": "the command line"}
        return named_alike("tokenizer hardware model gpus capacity") | others

    def _read(self, problems: Collector) -> DataChoices:
        limits = dict[str, int]()
        attempt = problems.attempt
        if self.tokenizer is not None and is_run_file(self.inputs):
            remedy = "Leave it out, or change the file."
            problems.add(ConfigError("--tokenizer", expected="none beside a run file", got="one", remedy=remedy))
        if self.gpus is not None:
            attempt(lambda: read_whole("--gpus", self.gpus, most=MOST_RANKS))
        if self.row is not None:
            attempt(lambda: read_whole("--row", self.row, most=1 << 62))
        if self.out is not None:
            attempt(partial(refuse_unwritable_file, self.out))
        if self.context is not None and (most := attempt(partial(parse_tokens, self.context, "--context"))):
            limits[f"--context {most}"] = most
        if self.capacity is not None and (each := attempt(partial(parse_tokens, self.capacity, "--capacity"))):
            gpus = self.gpus or 1
            limits[f"{counted(gpus, 'GPU')} of --capacity {each} tokens hold, {gpus * each}"] = gpus * each
        text = self.batch_tokens
        tokens = None if text is None else attempt(partial(parse_tokens, text, "--batch-tokens"))
        scenario = None
        if self.model is not None and self.gpus is not None:
            choices = MeshChoices(model=self.model, gpus=self.gpus, hardware=self.hardware)
            scenario = choices.read(PlanChoices(), problems)
        elif self.model is not None or (self.gpus is not None and self.capacity is None):
            remedy = "Give both, or neither; --gpus alone goes with --capacity."
            got = "--model alone" if self.gpus is None else "--gpus alone"
            problems.add(ConfigError("--model", expected="--gpus beside it", got=got, remedy=remedy))
        return DataChoices(limits=limits, scenario=scenario, batch_tokens=tokens)

    def _sample(self, dataset: Dataset, tokenizer: Tokenizer | None) -> Iterator[str]:
        from lengthwise.data.survey import masked_row, stretches

        row = masked_row(dataset) if self.row is None else self.row - 1
        if row >= len(dataset.lengths):
            expected, remedy = f"a row from 1 to {len(dataset.lengths)}", "Name another row."
            raise ConfigError("--row", expected=expected, got=str(self.row), remedy=remedy)
        length, losses = int(dataset.lengths[row]), int(dataset.loss_tokens[row])
        yield f"row {row + 1} ({dataset.name(row)}): {counted(length, 'token')}, {losses} with a loss"
        for each in stretches(dataset, row, _SHOWN_TOKENS):
            text = " ".join(map(str, each.ids)) if tokenizer is None else repr(tokenizer.decode(each.ids))
            yield f"  {'loss   ' if each.has_loss else 'no loss'} {len(each.ids):>6}  {text}"
        if length > _SHOWN_TOKENS:
            yield f"  and {length - _SHOWN_TOKENS} more tokens"


def _simulated(choices: DataChoices, dataset: Dataset, tokenizers: Sequence[str], config: RunConfig | None) -> str:
    from lengthwise.report.simulation import answer_sentence

    assert choices.scenario is not None, "asked for"
    known = known_lengths(dataset, "data", tokenizers, config)
    batches, context = known.batches(choices.batch_tokens, _BATCHES, None, devices=choices.scenario.devices)
    scenario = replace(choices.scenario, context_tokens=context)
    found = compare_ways(scenario, batches, **({} if config is None else trained_of(config)))
    return f"simulated: {answer_sentence(found, known.unit)}"


def _heading(facts: Survey, unit: str) -> str:
    summary = summarize_lengths(facts.lengths)
    left_out = "".join(f", {number} left out ({reason})" for reason, number in facts.skipped.items())
    return (
        f"{counted(summary.num_sequences, 'sequence')}, {count(facts.num_tokens)} {unit}, "
        f"median {summary.median_tokens:,}, longest {summary.longest_tokens:,}{left_out}; the longest 1 % hold "
        f"{percent(summary.top_token_share)} of the tokens and {percent(summary.top_attention_share)} of the attention"
    )


def _bad_lines(bad: list[DataError]) -> Iterator[str]:
    for each in bad[:_SHOWN_BAD]:
        yield f"bad     {each}"
    if len(bad) > _SHOWN_BAD:
        yield f"bad     and {len(bad) - _SHOWN_BAD} more"


def _refused(read: Callable[[], Dataset]) -> list[LengthwiseError]:
    """Return the problems for which a run refuses the data; rows are read again, as `train` reads them."""
    problems = Collector()
    problems.attempt(read)
    return problems.problems


def _refused_lines(refused: list[LengthwiseError], names: Mapping[str, str]) -> Iterator[str]:
    yield f"REFUSED a run stops before its first step: {counted(len(refused), 'problem')}"
    yield from (f"  {each.render(names)}" for each in refused)


def _loss_lines(dataset: Dataset, facts: Survey) -> Iterator[str]:
    from lengthwise.data.survey import named

    share, rows = percent(facts.num_loss_tokens / facts.num_tokens), facts.rows_without_loss
    without = f"; {counted(len(rows), 'row')} without any: {named(dataset, rows)}" if len(rows) else ""
    yield f"loss    {count(facts.num_loss_tokens)} tokens have a loss, {share}{without}"


def _copy_lines(dataset: Dataset, facts: Survey) -> Iterator[str]:
    copies = facts.copies
    if not copies.rows:
        yield "copies  no row is a copy of another"
        return
    share = percent(copies.tokens / facts.num_tokens)
    yield (
        f"copies  {counted(copies.rows, 'row')}, {share} of the tokens, are copies of earlier ones; most often, "
        f"{copies.most} times, {dataset.name(copies.original)}, as {dataset.name(copies.first_copy)}"
    )


def _fit_lines(dataset: Dataset, what: str, limit: int) -> Iterator[str]:
    from lengthwise.data.survey import rows_over

    rows = rows_over(dataset, limit)
    if not len(rows):
        yield f"fits    no row has more tokens than {what}"
        return
    shown = ", ".join(f"{dataset.name(int(row))} ({dataset.lengths[row]:,})" for row in rows[:_NAMED])
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    verb = "has" if len(rows) == 1 else "have"
    yield f"too long {counted(len(rows), 'row')} {verb} more tokens than {what}: {shown}{more}"


def data_page(
    heading: str,
    lines: Sequence[str],
    lengths: Sequence[int] | np.ndarray,
    longest: Sequence[Sequence[str]],
    sample: Sequence[str],
) -> str:
    """Return the page; all text from outside is escaped. longest: a table, headings first."""
    said = "".join(f"<p>{escape(line)}</p>" for line in lines)
    row = "".join(f"<p class=key>{escape(each)}</p>" for each in sample)
    return html_page(
        "Lengthwise: data",
        f"<h1>What this data is</h1><p>{escape(heading)}</p>{said}<h2>Lengths</h2>{length_chart(lengths)}"
        f"<h2>Longest rows</h2>{html_table(longest)}<h2>One row, and what of it has a loss</h2>{row}",
    )
