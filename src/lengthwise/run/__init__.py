"""The engine: run a plan on every rank, reduce once, update, and check against one process."""
