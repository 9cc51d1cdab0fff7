"""The hook for errors of ours that nothing in a user's script catches."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from lengthwise.core.errors import LengthwiseError


def report_in_a_line() -> None:
    """Report an uncaught error of ours without a traceback, because its text says what to change.

    A hook that the script has set stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, LengthwiseError) or error.__cause__ is not None:  # the cause may be the user's own error
        sys.__excepthook__(kind, error, trace)
    elif (rank := os.environ.get("RANK", "0")) == "0":
        print(error, file=sys.stderr)
    else:  # in one line: it may differ from rank 0's error
        print(f"rank {rank}: {' | '.join(str(error).splitlines())}", file=sys.stderr)
