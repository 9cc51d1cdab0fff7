"""Simulate the same batch on clusters that nobody here has. Needs no torch and no GPU: seconds."""

import lengthwise

tokens = [262_144] + [32_768] * 12 + [2_048] * 400
cost = lengthwise.costs("llama-7b", "h100")

for ranks in (8, 16, 32):
    cluster = lengthwise.Cluster(ranks=ranks, capacity_tokens=65_536)
    # The score adds up work; the simulator also knows what waits for which transfer, so it is never quicker.
    step = lengthwise.simulate(lengthwise.plan(tokens, cluster, cost), cost)
    rate = sum(tokens) / step.step_seconds
    print(f"{ranks} GPUs: {step.step_seconds:.2f} s a step (simulated), {rate:,.0f} tokens/s")
