"""Calls of `lengthwise simulate`, as a user makes them."""

import pytest

from lengthwise.cli import main

SMALL = ["--model", "llama-7b", "--ranks", "16", "--batch-tokens", "256K", "--batches", "2", "--capacity", "8K"]
OWN = ("--model", "llama-7b", "--ranks", 4, "--batch-tokens", "4K", "--batches", 1, "--capacity", "8K")


def simulate(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", *map(str, arguments)])
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err
