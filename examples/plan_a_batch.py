"""Plan one batch, and see what the plan gains over one fixed mesh. Needs no torch and no GPU: a second."""

import lengthwise

# One long document, some of middle length, many short ones: what makes a fixed context-parallel size wasteful.
tokens = [131_072] + [16_384] * 8 + [1_024] * 200
cluster = lengthwise.Cluster(ranks=16, capacity_tokens=32_768)
cost = lengthwise.costs("llama-7b", "h100")

for planner in ("static", "lengthwise"):
    plan = lengthwise.plan(tokens, cluster, cost, lengthwise.options(planner=planner))
    score = lengthwise.score(plan, cost)
    print(f"{planner}: {score.makespan_seconds:.2f} s (modelled), ranks idle {score.idle_ratio:.0%} of it")
