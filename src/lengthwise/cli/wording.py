"""Errors of the library in the words of a command: they name the option that was typed, not the argument it becomes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lengthwise.core.errors import LengthwiseError, Problems


@contextmanager
def told_in_options(options: Mapping[str, str]) -> Iterator[None]:
    """Reword errors raised inside: `options` maps a name of the library to what the user typed for it.

    A name that begins the place of an error is replaced there; one that no prose would use (with an underscore, a dot
    or in backquotes) everywhere.
    """
    try:
        yield
    except LengthwiseError as error:
        raise in_options(error, options) from None


def in_options(error: LengthwiseError, options: Mapping[str, str]) -> LengthwiseError:
    """Return the same error, or all of several, in the words of a command."""
    if isinstance(error, Problems):
        return Problems([in_options(each, options) for each in error.problems])
    where, expected, got, remedy = error.where, error.expected, error.got, error.remedy
    for name, option in sorted(options.items(), key=lambda pair: -len(pair[0])):  # model shape before model
        where = re.sub(rf"^{re.escape(name)}(?![\w.-])", lambda _, option=option: option, where)
        if re.search(r"[_.`]", name):
            word = re.compile(rf"(?<![\w-]){re.escape(name)}(?!\w)")
            where, expected, got, remedy = (
                word.sub(lambda _, option=option: option, text) for text in (where, expected, got, remedy)
            )
    return type(error)(where, expected=expected, got=got, remedy=remedy)
