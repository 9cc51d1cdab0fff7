"""Plans the steps of a run in its own process, ahead of the steps; all ranks get the same plans."""
