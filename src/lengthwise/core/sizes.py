"""Numbers of tokens as the field writes them: 256K, 2M, 32M, with K = 1,024 and M = 1,024 x 1,024."""

from __future__ import annotations

import re

from lengthwise.core.errors import ConfigError

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)\s*", re.IGNORECASE)
_MOST = 2**53


def parse_tokens(text: str, where: str) -> int:
    """Read a number of tokens: `8192`, `8K`, `1.5M`; K, M and G are binary, as context lengths are.

    Raises:
        ConfigError: anything else, or no whole number from 1 to 2^53.
    """
    written = _WRITTEN.fullmatch(text)
    value = float(written[1]) * _UNITS[written[2].upper()] if written and len(written[1]) < 20 else 0.0
    if not 1 <= value <= _MOST or value != int(value):
        raise ConfigError(
            where,
            expected="a whole number of tokens, as 8192, 256K or 2M (K = 1024, M = 1024 x 1024)",
            got=repr(text),
            remedy=f"Mend {where}.",
        )
    return int(value)
