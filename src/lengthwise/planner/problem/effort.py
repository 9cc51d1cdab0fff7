"""How hard a planner tries, counted in estimated seconds, never timed: docs/decisions/small-steps.md."""

GOOD_ENOUGH = 1.0005  # of the bound; further tries could gain no more than this
FAR = 1.01  # of the bound; above it other ways are worth several times the time
SMALL_STEP = 50_000  # sequences x ranks, up to which other planners take seconds at most
HEADS_SECONDS = 0.1  # plans made for the sake of split heads
SEQUENCE_SECONDS = 3e-4  # a sequence in the plans of all other planners
WAVE_SECONDS = 7e-4  # a rank in one microbatch of the plan in lock-step
HEADS_FACTOR = 3.5  # of both, where each piece may split heads
TABLE_SECONDS = 0.025  # all levels of one table of degrees
CHANGE_SECONDS = 2e-5  # one piece of one change, of which there may be one a sequence
LARGE_STEP = 1_000_000  # sequences x ranks, above which only what a step asks for is tried
OPEN = 64  # places of one kind in which room is looked for; others are taken as full
TOLD_APART = 9  # relative speeds at which rings are priced and ranks are kept apart; the others lie between them
