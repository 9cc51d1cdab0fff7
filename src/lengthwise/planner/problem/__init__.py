"""What a step asks of a planner, the degrees and times that bound it, and the score that judges any plan of it."""
