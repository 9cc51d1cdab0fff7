"""Random programs of a training loop, run on a session over ranks and on a plain loop, and compared."""
