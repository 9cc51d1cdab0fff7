"""Data named on the command line: a run file's, files and folders; and the lengths that batches are drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.core.errors import Collector, ConfigError, raise_problems
from lengthwise.core.names import counted, unknown_name
from lengthwise.core.sizes import parse_tokens, read_whole

if TYPE_CHECKING:
    from lengthwise.config import DataSource
    from lengthwise.simulator.branches import Branches

_RUN_FILES = (".yaml", ".yml")
_PUBLISHED_CONTEXT = "128K"
_EMPTY = ("error", "skip")
_MOST_SEQUENCES = 2**22  # of a batch: short lengths and the batch of a large cluster would take all memory


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSources:
    """Sources, what makes tokens of their texts, and what messages call them by."""

    sources: tuple[DataSource, ...]
    tokenizer: str
    key: str


def is_run_file(inputs: Sequence[Path]) -> bool:
    """Return whether one run file was named, and no data."""
    return len(inputs) == 1 and inputs[0].suffix in _RUN_FILES


def wrong_paths(paths: Sequence[Path], key: str) -> list[ConfigError]:
    """Return the problems of paths of data that were given as `key`."""
    problems: list[ConfigError] = []
    for path in paths:
        if not path.is_file() and not path.is_dir():
            got = f"{path}: {'not a regular file' if path.exists() else 'nothing there'}"
            remedy = "Correct the path."
            problems.append(ConfigError(key, expected="an existing file or folder", got=got, remedy=remedy))
    return problems


def asked_sources(
    inputs: Sequence[Path], tokenizer: str, overrides: Sequence[str] = (), *, of_eval: bool = False, **limits: object
) -> NamedSources:
    """Return the named data; `tokenizer` and `limits` are for files, `of_eval` for run files.

    Raises:
        ConfigError: nothing was named, or it does not exist; Problems: several of these, or of the run file.
    """
    from lengthwise.config import DataSource, load_config

    if is_run_file(inputs):
        config = load_config(inputs[0], overrides)
        if of_eval and config.eval is None:
            remedy = "Add eval to the run file, or leave out --eval."
            raise ConfigError("--eval", expected="a run file with eval", got="none", remedy=remedy)
        if of_eval and config.eval is not None:
            return NamedSources(sources=config.eval.data, tokenizer=config.tokenizer_name, key="eval.data")
        return NamedSources(sources=config.data, tokenizer=config.tokenizer_name, key="data")
    problems = Collector()
    if not inputs:
        remedy = "Name a run file, or files of data."
        problems.add(ConfigError("FILE", expected="a run file or files of data", got="none", remedy=remedy))
    for each in wrong_paths(inputs, "FILE"):
        problems.add(each)
    problems.raise_all()
    sources = tuple(DataSource.model_validate({"path": path.absolute(), **limits}) for path in inputs)
    local = str(Path(tokenizer).absolute()) if Path(tokenizer).is_dir() else tokenizer
    return NamedSources(sources=sources, tokenizer=local, key="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLengths:
    """Lengths to draw batches from, in tokens, and how they were counted.

    unit: "tokens", "bytes" of texts that no tokenizer has seen, or "tokens of NAME". left_out: skipped rows by reason.
    recipe: a published set, drawn anew for each batch.
    """

    name: str
    recipe: str | None = None
    lengths: Sequence[int] = ()
    unit: str = "tokens"
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def note(self) -> str:
        """What a reader of the figures must know of how these lengths were counted; empty: nothing."""
        notes = [f"{counted(number, 'row')} left out ({reason})" for reason, number in self.left_out.items()]
        if "bytes" in self.unit.split(" and "):
            notes.append(
                "texts counted in bytes, not tokens (English has 4 to 5 bytes a token): --tokenizer counts real tokens"
            )
        return "; ".join(notes)

    def batches(
        self, wanted_tokens: int, number: int, context_tokens: int | None, *, prompt_tokens: int = 0
    ) -> tuple[list[list[int]], int]:
        """Draw `number` batches, each with its own seed; return them and the longest possible sequence.

        prompt_tokens: in front of each known length; a sequence is both.

        Raises:
            ConfigError: a context below the longest of one's own lengths, or not above the prompt, or batches of too
                many of them; Problems: several of these.
        """
        from lengthwise.data.recipes import draw_lengths

        if self.recipe is not None:
            context = context_tokens or parse_tokens(_PUBLISHED_CONTEXT, "--context")
            if context <= prompt_tokens:
                expected, remedy = f"more than the {prompt_tokens} tokens of a prompt", "Raise it."
                raise ConfigError("--context", expected=expected, got=str(context), remedy=remedy)
            self._refuse_many(wanted_tokens // context, wanted_tokens)
            own = context - prompt_tokens
            batches = [draw_lengths(self.recipe, wanted_tokens, seed, own) for seed in range(number)]
            if prompt_tokens:
                whole = ([prompt_tokens + length for length in lengths] for lengths in batches)
                batches = [drawn_batch(lengths, wanted_tokens, seed) for seed, lengths in enumerate(whole)]
            return batches, context
        lengths = [prompt_tokens + length for length in self.lengths]
        longest = max(lengths)
        problems: list[ConfigError] = []
        if context_tokens is not None and longest > context_tokens:
            expected, remedy = f"at least the longest sequence, {longest}", "Raise it."
            problems.append(ConfigError("--context", expected=expected, got=str(context_tokens), remedy=remedy))
        try:
            self._refuse_many(round(wanted_tokens * len(lengths) / sum(lengths)), wanted_tokens)
        except ConfigError as error:
            problems.append(error)
        raise_problems(problems)
        return [drawn_batch(lengths, wanted_tokens, seed) for seed in range(number)], context_tokens or longest

    def _refuse_many(self, sequences: int, wanted_tokens: int) -> None:
        if sequences > _MOST_SEQUENCES:
            expected = f"a batch of at most {_MOST_SEQUENCES:,} sequences"
            got = f"{wanted_tokens:,} tokens, about {sequences:,}"
            raise ConfigError("--batch-tokens", expected=expected, got=got, remedy="Lower it.")


def listed_lengths(name: str) -> KnownLengths:
    """Return what --lengths names: a published set, or a JSON file (`lengths_from_file`); ConfigError: unknown."""
    from lengthwise.data.recipes import RECIPES, lengths_from_file

    if name in RECIPES:
        return KnownLengths(name=name, recipe=name)
    if not name.endswith(".json") and not Path(name).exists():
        raise unknown_name("--lengths", name, RECIPES)
    return KnownLengths(name=name, lengths=lengths_from_file(name))


def read_branches(text: str) -> Branches:
    """Read `8x1K`: completions of a prompt, and its tokens; ConfigError: anything else, or nothing to share."""
    from lengthwise.simulator.branches import LEAST_PROMPT_TOKENS, Branches

    completions, _, prompt = text.lower().partition("x")
    try:
        number = read_whole("completions", int(completions) if completions.isdecimal() else completions, least=2)
        tokens = read_whole("prompt", parse_tokens(prompt, "prompt"), least=LEAST_PROMPT_TOKENS)
    except (ConfigError, ValueError):
        expected = f"2 or more completions x {LEAST_PROMPT_TOKENS} or more tokens of their prompt, as 8x1024 or 8x1K"
        got, remedy = repr(text), "Give both numbers."
        raise ConfigError("--branches", expected=expected, got=got, remedy=remedy) from None
    return Branches(completions=number, prompt_tokens=tokens)


def refuse_data(paths: Sequence[Path], empty: str) -> None:
    """Raise ConfigError, or Problems, for nothing at a path and for no such way to treat empty rows."""
    problems = [] if empty in _EMPTY else [unknown_name("--empty", empty, _EMPTY)]
    raise_problems([*problems, *wrong_paths(paths, "--data")])


def lengths_of_data(paths: Sequence[Path], tokenizer: str, empty: str) -> KnownLengths:
    """Read one's own data and count their tokens; errors of `load_dataset`, all bad rows together."""
    from lengthwise.config import DataSource
    from lengthwise.data import Tokenizer, load_dataset, load_tokenizer
    from lengthwise.data.prepared import prepared_with

    used: list[str] = []

    def load() -> Tokenizer:
        used.append(tokenizer)
        return load_tokenizer(tokenizer)

    sources = [DataSource.model_validate({"path": path, "empty": empty}) for path in paths]
    dataset = load_dataset(sources, tokenizer=load, vocab_size=None, key="--data", check_tokenizer=False)
    used += [name for name in map(prepared_with, paths) if name is not None]
    units = ["bytes" if name == "bytes" else f"tokens of {name}" for name in dict.fromkeys(used)]
    unit = " and ".join(units) or "tokens"
    lengths = [int(length) for length in dataset.lengths[dataset.ids]]
    others = f" and {counted(len(paths) - 1, 'other')}" if len(paths) > 1 else ""
    return KnownLengths(name=f"{paths[0]}{others}", lengths=lengths, unit=unit, left_out=dataset.skipped)


def drawn_batch(known: Sequence[int], wanted_tokens: int, seed: int) -> list[int]:
    """Draw sequences without putting back, all of them before any twice, until a batch has `wanted_tokens`."""
    rng = np.random.Generator(np.random.PCG64(seed))
    batch: list[int] = []
    total = 0
    while total < wanted_tokens:
        for place in rng.permutation(len(known)).tolist():
            batch.append(known[place])
            total += known[place]
            if total >= wanted_tokens:
                break
    return batch
