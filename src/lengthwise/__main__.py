"""`python -m lengthwise`, which torchrun can start: `torchrun ... -m lengthwise train run.yaml`."""

from lengthwise.cli import main

main()
