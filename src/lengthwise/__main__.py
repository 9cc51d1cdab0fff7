"""`lengthwise`, and `python -m lengthwise`, which torchrun can start: `torchrun ... -m lengthwise train run.yaml`."""

import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C while its modules are still being imported ends it like any other."""
    try:
        from lengthwise.cli import main as run
    except KeyboardInterrupt:
        print("interrupted: nothing was saved", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from None
    run()


if __name__ == "__main__":
    main()
