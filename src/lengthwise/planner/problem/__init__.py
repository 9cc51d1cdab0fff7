"""What a step asks of a planner, the degrees and times that bound it, and the score of any plan of it."""
