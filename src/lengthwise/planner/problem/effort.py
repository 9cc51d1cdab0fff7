"""How hard a planner tries, in estimated seconds, never timed: docs/decisions/small-steps.md."""

GOOD_ENOUGH = 1.0005  # times the bound; further tries could gain no more than this
FAR = 1.01  # times the bound; above it other ways are worth several times the time
SMALL_STEP = 50_000  # sequences x ranks; up to here other planners take seconds at most
HEADS_SECONDS = 0.1  # of plans made to split heads
SEQUENCE_SECONDS = 3e-4  # per sequence, in the plans of other planners
WAVE_SECONDS = 7e-4  # per rank and microbatch of the plan in lock-step
HEADS_FACTOR = 3.5  # times both, if each piece may split heads
TABLE_SECONDS = 0.025  # of all levels of one table of degrees
CHANGE_SECONDS = 2e-5  # per piece of one change; at most one piece per sequence
LARGE_STEP = 1_000_000  # sequences x ranks; above, pipelines seldom try a plan for ranks without stages
OPEN = 64  # places of one kind examined for room; others count as full
TOLD_APART = 9  # relative speeds at which rings are priced; others are interpolated
