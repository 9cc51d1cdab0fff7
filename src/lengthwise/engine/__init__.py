"""One optimizer step on this rank: microbatches of a plan, gradients, the sharded update."""
