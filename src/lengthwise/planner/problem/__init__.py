"""A step as planners see it, the degrees and times that bound it, and the score of any plan of it."""
