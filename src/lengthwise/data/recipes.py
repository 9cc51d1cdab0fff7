"""Lengths of published data sets, drawn again, to plan and simulate without any data.

`recipes.json` names the sets and their sources: token shares of power-of-two bins, or lognormals with a cap. Bins are
filled from the longest down; each passes its surplus or shortage to the next. The last length is cut to the sum
`tokens`, then all are shuffled. Only PCG64 and IEEE sums and products are used (a library's exp differs between
machines), so (recipe, tokens, seed) gives the same lengths everywhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lengthwise.core.errors import ConfigError, DataError, LengthwiseError, raise_problems
from lengthwise.core.files import read_json, read_package_json
from lengthwise.core.names import counted, unknown_name
from lengthwise.core.plan import WithImages, read_images
from lengthwise.core.sizes import MOST, read_whole

_FILE = read_package_json("lengthwise.data", "recipes.json")
_SETS: Mapping[str, Any] = {name: value for name, value in _FILE.items() if isinstance(value, dict)}
RECIPES = tuple(_SETS)
_BLOCK = 1024  # lengths per draw
_MOST_TOKENS = 10**12
_SHORTEST_LOGNORMAL = 16
_LENGTH = "a whole number of at least 1, at most 2^53"
_NAMED = 5  # wrong lengths named in one message; the others are counted
_MOST_IMAGES = 100_000  # of a sequence of a plan file


def draw_lengths(recipe: str, tokens: int, seed: int, longest_tokens: int | None = None) -> list[int]:
    """Draw lengths of a published set, one of `RECIPES`, that sum to `tokens`, in random order.

    Draws longer than `longest_tokens` are clipped to it. Raises ConfigError for an unknown recipe or a number out of
    range.
    """
    if recipe not in _SETS:
        raise unknown_name("recipe", recipe, RECIPES)
    tokens = read_whole("tokens", tokens, most=_MOST_TOKENS)
    seed = read_whole("seed", seed, least=0, most=2**63)
    cap = 2**62 if longest_tokens is None else read_whole("longest_tokens", longest_tokens, most=2**62)
    rng = np.random.Generator(np.random.PCG64(seed))
    draws = _SETS[recipe]
    if "lognormal_mu" in draws:
        lengths = _draw_lognormal(draws, tokens, min(cap, draws["max_tokens"]), rng)
    else:
        lengths = _draw_bins(draws, tokens, cap, rng)
    return rng.permutation(lengths).tolist()


def _draw_bins(draws: Mapping[str, Any], tokens: int, cap: int, rng: np.random.Generator) -> NDArray[np.int64]:
    edges = [1024 * edge for edge in _FILE["bins_k_tokens_lower_edge"]]
    edges[0] = draws["first_bin_lower_tokens"]
    shares = draws["token_share_percent"]
    parts: list[NDArray[np.int64]] = []
    wanted = 0.0
    for number in reversed(range(len(edges))):
        wanted += tokens * shares[number] / sum(shares)
        upper = edges[number + 1] if number + 1 < len(edges) else edges[number]
        if number == 0:
            wanted = tokens - sum(int(part.sum()) for part in parts)
        part = _draw_until(lambda: np.minimum(_log_uniform(edges[number], upper, rng), cap), wanted)  # noqa: B023
        if number:  # the last one stays if the sum is nearer with it
            over = int(part.sum()) - wanted
            part = part[:-1] if len(part) and over > part[-1] / 2 else part
        parts.append(part)
        wanted -= int(part.sum())
    return _cut_to(np.concatenate(parts), tokens)


def _draw_until(draw: Any, wanted: float) -> NDArray[np.int64]:
    """Draw blocks of lengths, and return the first that reach `wanted` tokens."""
    parts: list[NDArray[np.int64]] = []
    total = 0
    while total < wanted:
        block = draw()
        sums = total + np.cumsum(block)
        kept = int(np.searchsorted(sums, wanted)) + 1
        parts.append(block[:kept])
        total = int(sums[min(kept, len(block)) - 1])
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _log_uniform(lower: int, upper: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw a block of log-uniform lengths in [lower, upper); all are `lower` if the two are equal.

    A length is lower x 2^k x m, k a whole number, m in [1, 2) accepted with probability 1 / m.
    """
    if lower == upper:
        return np.full(_BLOCK, lower, dtype=np.int64)
    octaves = max(1, math.ceil(math.log2(upper / lower)))
    lengths = np.zeros(0, dtype=np.int64)
    while not len(lengths):
        octave = rng.integers(0, octaves, size=_BLOCK)
        mantissa = 1.0 + rng.random(_BLOCK)
        accepted = rng.random(_BLOCK) * mantissa < 1.0
        lengths = (np.ldexp(lower * mantissa, octave)[accepted]).astype(np.int64)
        lengths = lengths[lengths < upper]
    return lengths


def _draw_lognormal(draws: Mapping[str, Any], tokens: int, cap: int, rng: np.random.Generator) -> NDArray[np.int64]:
    mu, sigma = draws["lognormal_mu"], draws["lognormal_sigma"]
    least = min(_SHORTEST_LOGNORMAL, cap)

    def draw() -> NDArray[np.int64]:
        values = _exp(mu + sigma * rng.standard_normal(_BLOCK))
        return np.clip(values, least, cap).astype(np.int64)

    return _cut_to(_draw_until(draw, tokens), tokens)


def _exp(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return e to the power of values, by sums and products alone: the same bits on every machine."""
    twos = np.floor(values / math.log(2) + 0.5)
    rest = values - twos * math.log(2)
    result = np.ones_like(values)
    for n in range(18, 0, -1):
        result = 1.0 + result * rest / n
    return np.ldexp(result, twos.astype(np.int64))


def _cut_to(lengths: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Return the first lengths that sum to `tokens`, the last of them cut."""
    sums = np.cumsum(lengths)
    last = int(np.searchsorted(sums, tokens))
    kept = lengths[: last + 1].copy()
    kept[-1] -= int(sums[last]) - tokens
    return kept


def lengths_from_file(path: str | Path) -> list[int]:
    """Read lengths: a JSON list of whole numbers, an object with recipe, tokens and seed, or a plan file's.

    With images they are `WithImages`. Raises DataError, PlanError for images, or Problems, for a file that cannot be
    read, a repeated key or a bad entry; names file and index.
    """
    where = str(path)
    try:
        content = read_json(path)
    except ValueError as error:
        raise _bad(where, "a JSON file", str(error)) from None
    if isinstance(content, dict):
        is_plan = isinstance(content.get("tokens"), list)
        return _lengths_of_plan(content, where) if is_plan else _lengths_from_recipe(content, where)
    return _listed(content, where)


def _listed(content: Any, where: str) -> list[int]:
    if not isinstance(content, list) or not content:
        got = "an empty list" if content == [] else type(content).__name__
        raise _bad(where, "a non-empty list of lengths, or an object with recipe, tokens and seed", got)
    wrong = [i for i, value in enumerate(content) if type(value) is not int or not 1 <= value <= MOST]
    problems = [_bad(f"{where}[{i}]", _LENGTH, json.dumps(content[i])[:80]) for i in wrong[:_NAMED]]
    if len(wrong) > _NAMED:
        problems.append(_bad(where, "such lengths", f"{len(wrong) - _NAMED} more that are not"))
    raise_problems(problems)
    return content


def _lengths_of_plan(content: Mapping[str, Any], where: str) -> list[int]:
    lengths = _listed(content["tokens"], f"{where}: tokens")
    if content.get("parents"):
        raise _bad(f"{where}: parents", "whole sequences", "some that continue others")
    works = read_images(content.get("images", []), f"{where}: images", len(lengths))
    for i, (tokens, (total, largest)) in enumerate(zip(lengths, works, strict=bool(works))):
        if total > largest * (most := min(tokens, _MOST_IMAGES)):
            expected, got = f"the work of at most {counted(most, 'image')}, of the largest", f"[{total}, {largest}]"
            raise _bad(f"{where}: images[{i}]", expected, got)
    return WithImages(lengths, [_as_images(*each) for each in works]) if works else lengths


def _as_images(total: float, largest: float) -> list[tuple[int, float]]:
    """Return images of this work together, none of more than the largest."""
    if not largest:
        return []
    whole, rest = divmod(total, largest)
    return [(0, largest)] * int(whole) + [(0, rest)] * (rest > 0)


def _lengths_from_recipe(content: Mapping[str, Any], where: str) -> list[int]:
    known = ("recipe", "tokens", "seed", "longest_tokens")
    problems = [_as_data(unknown_name(f"{where}: {key}", key, known)) for key in content if key not in known]
    missing = [key for key in known[:3] if key not in content]
    if missing:
        problems.append(_bad(where, "recipe, tokens and seed", f"no {', '.join(missing)}"))
    elif not isinstance(content["recipe"], str):
        problems.append(_bad(f"{where}: recipe", "the name of a recipe", repr(content["recipe"])))
    raise_problems(problems)
    try:
        return draw_lengths(**content)
    except ConfigError as error:
        raise _as_data(error, prefix=f"{where}: ") from None


def _bad(where: str, expected: str, got: str) -> DataError:
    return DataError(where, expected=expected, got=got, remedy="Correct the file of lengths.")


def _as_data(error: LengthwiseError, prefix: str = "") -> DataError:
    return DataError(prefix + error.where, expected=error.expected, got=error.got, remedy=error.remedy)
