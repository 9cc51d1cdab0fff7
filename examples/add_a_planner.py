"""Write a planner of your own and hold it against ours. Needs no torch and no GPU: a second.

Here it is registered in this process. A package of yours names it in its entry points (group `lengthwise.planners`);
then `lengthwise plan --planner NAME`, `simulate` and `train` know it, too.
"""

import lengthwise
from lengthwise.program import ring_order


def one_by_one(request: lengthwise.PlanRequest) -> list[lengthwise.Microbatch]:
    """Put every sequence over all ranks, one after the other."""
    ranks = ring_order(0, request.cluster.ranks)  # in this order every transfer is between neighbours on the line
    pieces = [lengthwise.Piece(ranks=ranks, sequences=(number,)) for number in range(len(request.tokens))]
    return [lengthwise.Microbatch(pieces=(piece,)) for piece in pieces]


lengthwise.register_planner("one-by-one", one_by_one)
tokens, cost = [60_000, 9_000, 800, 700] * 8, lengthwise.costs("llama-7b", "h100")
cluster = lengthwise.Cluster(ranks=16, capacity_tokens=8_192)

for planner in ("one-by-one", "lengthwise"):  # what a planner returns is checked before anyone scores it
    plan = lengthwise.plan(tokens, cluster, cost, lengthwise.options(planner=planner))
    print(f"{planner}: {lengthwise.score(plan, cost).makespan_seconds:.2f} s (modelled)")
