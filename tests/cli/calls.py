"""Calls of the command, as a user makes them."""

from lengthwise.core.plan import Plan
from lengthwise.program import check_plan

SMALL = ["--model", "llama-7b", "--ranks", "16", "--batch-tokens", "256K", "--batches", "2", "--capacity", "8K"]
OWN = ("--model", "llama-7b", "--ranks", 4, "--batch-tokens", "4K", "--batches", 1, "--capacity", "8K")


def read_plan(path):
    plan = Plan.from_json(path.read_text())
    check_plan(plan)
    return plan
