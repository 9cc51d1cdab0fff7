"""Read a plan file, from here or of another tool, check it and list what each rank does. A second."""

import sys
from pathlib import Path

import lengthwise

if len(sys.argv) > 1:  # a file of `lengthwise plan --out plan.json`
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
else:
    cost = lengthwise.costs("llama-7b", "h100")
    cluster = lengthwise.Cluster(ranks=4, capacity_tokens=16_384)
    text = lengthwise.plan([40_000, 9_000, 8_000, 7_000, 6_000, 800], cluster, cost).to_json()

plan = lengthwise.Plan.from_json(text)  # refuses what is no plan file, by field
lengthwise.check(plan)  # refuses what no rank could run: a sequence twice, more tokens than fit

for rank in range(plan.ranks):
    print(f"rank {rank}")
    for number, microbatch in enumerate(plan.microbatches):
        for piece in microbatch.pieces:
            if rank in piece.ranks:
                lengths = ", ".join(str(plan.tokens[sequence]) for sequence in piece.sequences)
                print(f"  microbatch {number}: sequences of {lengths} tokens on {len(piece.ranks)} rank(s)")
