"""Data named on the command line: a run file's, files and folders; and the lengths from which batches are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.core.errors import Collector, ConfigError, raise_problems
from lengthwise.core.names import counted, unknown_name
from lengthwise.core.plan import WithImages, images_beside
from lengthwise.core.sizes import parse_tokens, read_whole

if TYPE_CHECKING:
    from lengthwise.config import DataSource, RunConfig
    from lengthwise.core.plan import Images
    from lengthwise.data import Batches, Dataset
    from lengthwise.simulator.branches import Branches

_RUN_FILES = (".yaml", ".yml")
_PUBLISHED_CONTEXT = "128K"
_TOKENS_A_DEVICE = 128 * 1024  # of a step without a given size
OF_A_STREAM = 1000  # sequences that are read of a stream
_EMPTY = ("error", "skip")
_MOST_SEQUENCES = 2**22  # of a batch: short lengths and a large cluster's batch would take all memory


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSources:
    """Sources, the name of their tokenizer, and their key in messages. config: the run file's settings, or None."""

    sources: tuple[DataSource, ...]
    tokenizer: str
    key: str
    config: RunConfig | None = None


def is_run_file(inputs: Sequence[Path]) -> bool:
    """Return whether the inputs are one run file, without data."""
    return len(inputs) == 1 and inputs[0].suffix in _RUN_FILES


def wrong_paths(paths: Sequence[Path], key: str) -> list[ConfigError]:
    """Return the problems of data paths that were given as `key`."""
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
    """Return the named data; `tokenizer` and `limits` are for files, `of_eval` for run files."""
    from lengthwise.config import DataSource, load_config

    if is_run_file(inputs):
        config = load_config(inputs[0], overrides)
        if of_eval and config.eval is None:
            remedy = "Add eval to the run file, or leave out --eval."
            raise ConfigError("--eval", expected="a run file with eval", got="none", remedy=remedy)
        if of_eval and config.eval is not None:
            return NamedSources(sources=config.eval.data, tokenizer=config.tokenizer_name, key="eval.data")
        return NamedSources(sources=config.data, tokenizer=config.tokenizer_name, key="data", config=config)
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
    """Lengths in tokens, from which batches are drawn, and how they were counted.

    unit: "tokens", "bytes" of texts without a tokenizer, or "tokens of NAME". left_out: number of skipped rows by
    reason. recipe: published set, drawn anew for each batch, or None. steps: steps of a run file, in the order of
    training, or None. images: function that returns the work on the images of rows, or None.
    """

    name: str
    recipe: str | None = None
    lengths: Sequence[int] = ()
    unit: str = "tokens"
    left_out: Mapping[str, int] = field(default_factory=dict)
    steps: Batches | None = None
    images: Callable[[Sequence[int]], Images] | None = None

    @property
    def note(self) -> str:
        """A note for readers of the figures on how these lengths were counted, or ""."""
        notes = [f"{counted(number, 'row')} left out ({reason})" for reason, number in self.left_out.items()]
        if "bytes" in self.unit.split(" and "):
            notes.append(
                "texts counted in bytes, not tokens (English has 4 to 5 bytes a token): --tokenizer counts real tokens"
            )
        return "; ".join(notes)

    def batches(
        self,
        wanted_tokens: int | None,
        number: int,
        context_tokens: int | None,
        *,
        devices: int,
        prompt_tokens: int = 0,
    ) -> tuple[list[list[int]], int]:
        """Return `number` batches, and the longest possible sequence.

        wanted_tokens: tokens of a batch, drawn with a seed of its own (default: a run file's first steps, else 128K a
        device). prompt_tokens: tokens in front of each known length; a sequence is both. ConfigError, or Problems: a
        context below the longest of one's own lengths, or not above the prompt, or too large batches.
        """
        from lengthwise.data.recipes import draw_lengths

        takes_steps = wanted_tokens is None and self.steps is not None
        wanted_tokens = wanted_tokens or _TOKENS_A_DEVICE * devices
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
            if not takes_steps:
                self._refuse_many(round(wanted_tokens * len(lengths) / sum(lengths)), wanted_tokens)
        except ConfigError as error:
            problems.append(error)
        raise_problems(problems)
        if takes_steps and self.steps is not None:
            known, rows = self.steps.dataset.lengths, [step.ids for step in islice(self.steps, number)]
            batches = [self._seen((prompt_tokens + known[ids]).tolist(), ids.tolist()) for ids in rows]
            return batches, context_tokens or longest
        ids = range(len(lengths)) if self.steps is None else self.steps.dataset.ids.tolist()
        drawn = (drawn_places(lengths, wanted_tokens, seed) for seed in range(number))
        batches = [self._seen([lengths[each] for each in those], [ids[each] for each in those]) for those in drawn]
        return batches, context_tokens or longest

    def _seen(self, lengths: list[int], rows: Sequence[int]) -> list[int]:
        """Return the lengths of rows with the work on their images, if there is any."""
        images = () if self.images is None else self.images(rows)
        return WithImages(lengths, images) if any(images) else lengths

    def _refuse_many(self, sequences: int, wanted_tokens: int) -> None:
        if sequences > _MOST_SEQUENCES:
            expected = f"a batch of at most {_MOST_SEQUENCES:,} sequences"
            got = f"{wanted_tokens:,} tokens, about {sequences:,}"
            raise ConfigError("--batch-tokens", expected=expected, got=got, remedy="Lower it.")


def listed_lengths(name: str) -> KnownLengths:
    """Return the lengths that --lengths names: a published set, or a JSON file (`lengths_from_file`)."""
    from lengthwise.data.recipes import RECIPES, lengths_from_file

    if name in RECIPES:
        return KnownLengths(name=name, recipe=name)
    if not name.endswith(".json") and not Path(name).exists():
        raise unknown_name("--lengths", name, RECIPES)
    lengths = lengths_from_file(name)
    images = images_beside(lengths)
    of_rows = (lambda rows: [images[row] for row in rows]) if images else None
    return KnownLengths(name=name, lengths=lengths, images=of_rows)


def read_branches(text: str) -> Branches:
    """Read `8x1K`: completions of a prompt, and its tokens; ConfigError for anything else, or nothing to share."""
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
    """Raise ConfigError, or Problems, for missing paths and an unknown way to treat empty rows."""
    problems = [] if empty in _EMPTY else [unknown_name("--empty", empty, _EMPTY)]
    raise_problems([*problems, *wrong_paths(paths, "--data")])


def lengths_of_data(paths: Sequence[Path], tokenizer: str, empty: str) -> KnownLengths:
    """Read one's own data and count their tokens; errors are those of `load_dataset`."""
    from lengthwise.config import DataSource

    sources = [DataSource.model_validate({"path": path, "empty": empty}) for path in paths]
    others = f" and {counted(len(paths) - 1, 'other')}" if len(paths) > 1 else ""
    return _lengths_of(sources, tokenizer, f"{paths[0]}{others}", key="--data", check_tokenizer=False)


def lengths_of_run(path: Path, config: RunConfig) -> KnownLengths:
    """Read the data of a run file, as training does; errors are those of `load_dataset`."""
    return _lengths_of(config.data, config.tokenizer_name, str(path), config)


def _lengths_of(
    sources: Sequence[DataSource], tokenizer: str, name: str, config: RunConfig | None = None, **how: Any
) -> KnownLengths:
    from lengthwise.data import Tokenizer, load_dataset, load_tokenizer
    from lengthwise.data.load import first_rows

    used: list[str] = []

    def load() -> Tokenizer:
        used.append(tokenizer)
        return load_tokenizer(tokenizer)

    streams = bool(sources[0].streaming)
    read = partial(first_rows, sequences=OF_A_STREAM) if streams else partial(load_dataset, **how)
    dataset = read(sources, tokenizer=load, vocab_size=None)
    first = f", its first {counted(len(dataset.ids), 'sequence')}" * streams
    return known_lengths(dataset, f"{name}{first}", tokenizers_of(used, sources), config)


def tokenizers_of(used: Sequence[str], sources: Sequence[DataSource]) -> list[str]:
    """Return the tokenizers of rows: the `used` ones, and those of prepared sources."""
    from lengthwise.data.prepared import prepared_with

    paths = (source.path for source in sources if source.path is not None)
    return list(dict.fromkeys([*used, *(each for each in map(prepared_with, paths) if each is not None)]))


def unit_of(tokenizers: Sequence[str]) -> str:
    """Return the unit of lengths, in words."""
    return " and ".join("bytes" if each == "bytes" else f"tokens of {each}" for each in tokenizers) or "tokens"


def known_lengths(
    dataset: Dataset, name: str, tokenizers: Sequence[str], config: RunConfig | None = None
) -> KnownLengths:
    """Return the lengths of read rows, with the steps of a run file; DataError if there are none to train on."""
    from lengthwise.cli.run_model import images_of
    from lengthwise.data import Batches

    return KnownLengths(
        name=name,
        lengths=dataset.lengths[dataset.ids].tolist(),
        unit=unit_of(tokenizers),
        left_out=dataset.skipped,
        steps=None if config is None else Batches(dataset, config),
        images=None if config is None else partial(images_of, config, dataset),
    )


def drawn_batch(known: Sequence[int], wanted_tokens: int, seed: int) -> list[int]:
    """Return the lengths that `drawn_places` draws."""
    return [known[place] for place in drawn_places(known, wanted_tokens, seed)]


def drawn_places(known: Sequence[int], wanted_tokens: int, seed: int) -> list[int]:
    """Draw sequences without replacement, all of them before any twice, until a batch has `wanted_tokens`."""
    rng = np.random.Generator(np.random.PCG64(seed))
    batch: list[int] = []
    total = 0
    while total < wanted_tokens:
        for place in rng.permutation(len(known)).tolist():
            batch.append(place)
            total += known[place]
            if total >= wanted_tokens:
                break
    return batch
