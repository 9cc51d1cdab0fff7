"""Errors of many rows: one of each kind with a count, and a count of further kinds."""

from __future__ import annotations

import re

from lengthwise.core.errors import DataError, raise_problems

_SHOWN = 20
_LINE = re.compile(r":\d+$")  # place of a row in its file


class Refusals:
    """Collects errors: the first of each kind with a count, up to 20 kinds, and a count of all others."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], tuple[DataError, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, error: DataError, times: int = 1) -> None:
        """Add an error that occurred `times` times."""
        self._count += times
        kind = (_LINE.sub("", error.where), error.expected, error.got)
        first, count = self._kept.get(kind, (error, 0))
        if count or len(self._kept) < _SHOWN:
            self._kept[kind] = (first, count + times)

    def raise_all(self, key: str) -> None:
        """Raise the errors, if any. key: config path of the sources."""
        problems = []
        for first, count in self._kept.values():
            got = first.got + (f" (and in {count - 1} more rows)" if count > 1 else "")
            problems.append(DataError(first.where, expected=first.expected, got=got, remedy=first.remedy))
        if self._count > sum(count for _, count in self._kept.values()):
            got, remedy = f"{self._count}, the first {_SHOWN} above", "Correct these; the same causes may repeat."
            problems.append(DataError(key, expected="no bad rows", got=got, remedy=remedy))
        raise_problems(problems)


def too_long(where: str, length: int, max_tokens: int, key: str) -> DataError:
    """Return the error for a row longer than max_tokens. key: config path of its source."""
    expected, got = f"at most max_tokens {max_tokens}", f"{length} tokens"
    remedy = f"Raise {key}.max_tokens, or set {key}.too_long: skip to leave such rows out."
    return DataError(where, expected=expected, got=got, remedy=remedy)
