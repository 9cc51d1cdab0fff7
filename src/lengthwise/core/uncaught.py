"""What a user's script shows of an error of ours that nothing catches."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from lengthwise.core.errors import LengthwiseError


def report_in_a_line() -> None:
    """From now on show an error of ours that ends the script without a traceback: its text says what to change.

    A hook that the script has set stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, LengthwiseError) or error.__cause__ is not None:  # the cause may be the user's own error
        sys.__excepthook__(kind, error, trace)
    elif (rank := os.environ.get("RANK", "0")) == "0":
        print(error, file=sys.stderr)
    else:  # in one line: it may be another error than that of rank 0
        print(f"rank {rank}: {' | '.join(str(error).splitlines())}", file=sys.stderr)
