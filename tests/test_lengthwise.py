"""What `import lengthwise` gives: names that are documented and light."""

import ast
import importlib
import inspect
import json
import subprocess
import sys

import pytest

import lengthwise
from lengthwise.session.keywords import SessionOptions

LIGHT = """
import sys
import lengthwise
heavy = {"torch", "transformers", "numpy", "pydantic"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
cost = lengthwise.costs("llama-7b", "h100")
plan = lengthwise.plan([900, 300, 200], lengthwise.Cluster(ranks=4, capacity_tokens=512), cost, lengthwise.options())
lengthwise.check(plan)
print(lengthwise.score(plan, cost).makespan_seconds, lengthwise.simulate(plan, cost).step_seconds)
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_import_and_planning_load_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    scored, simulated = map(float, done.stdout.split())
    assert 0 < scored <= simulated


def test_names_that_need_torch_say_so_where_it_is_missing() -> None:
    """Once a bare "No module named 'safetensors'"."""
    code = "import sys; sys.modules['torch'] = None; import lengthwise; lengthwise.train"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("ImportError: lengthwise.train: expected torch, transformers and safetensors; got no torch.")


@pytest.mark.parametrize("name", lengthwise.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    value = getattr(lengthwise, name)
    assert inspect.getdoc(value)
    assert name in dir(lengthwise)


STABLE = {  # a name that goes works for one minor version more, with a FutureWarning (docs/versions.md)
    "train": "run ranks overrides overwrite resume accept_changes max_restarts timeout_seconds callbacks",
    "verify": "run ranks overrides full plan timeout_seconds on_start on_phase",
    "plan": "tokens cluster cost options",
    "check": "plan",
    "score": "plan cost speeds",
    "simulate": "plan cost",
    "costs": "model hardware file stages simple",
    "options": "planner layers context_tokens recompute offload heads mode speeds stages virtual planning_share",
    "Cluster": "ranks capacity_tokens",
    "Session": "model optimizer lengths batch_tokens seed timeout_seconds ranks settings",
}
STABLE_SETTINGS = (
    "capacity_tokens planner offload shard ranks_per_node stages virtual heads measurements attention compile "
    "fused_layers experts overlap share_prefixes offload_optimizer recompute precision device"
)
STABLE_METHODS = (
    "backward backward_by_sequence batches capacity_tokens clip_grad_norm_ close evaluate expect grad_norm load "
    "longest_tokens save save_pretrained steps sum_over_ranks token_values whole whole_on_first"
)
STABLE_TRAINERS = {
    "transformers": "Trainer",
    "trl": "SFTTrainer DPOTrainer GRPOTrainer RLOOTrainer",
    "async_grpo": "AsyncGRPOTrainer",
}


def test_names_that_users_depend_on_stay() -> None:
    for name, arguments in STABLE.items():
        assert set(arguments.split()) <= set(inspect.signature(getattr(lengthwise, name)).parameters), name
    assert set(STABLE_SETTINGS.split()) <= set(SessionOptions.__annotations__)
    assert all(hasattr(lengthwise.Session, name) for name in STABLE_METHODS.split())
    for module, names in STABLE_TRAINERS.items():
        home = importlib.import_module(f"lengthwise.integrations.{module}")
        assert all(hasattr(home, name) for name in names.split())


def test_all_is_what_is_imported_for_types() -> None:
    names = set(vars(lengthwise)["_HOMES"])
    assert names == set(lengthwise.__all__)
    assert list(lengthwise.__all__) == sorted(names)


def test_types_are_those_of_the_homes_that_names_are_loaded_from() -> None:
    """What a type checker sees is what Python gives: each name has one home."""
    (block,) = (node for node in ast.parse(inspect.getsource(lengthwise)).body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: (str(node.module).removeprefix("lengthwise."), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen | {"options": ("planner", "PlanOptions")} == vars(lengthwise)["_HOMES"]


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'plans'; it has .* load_config"):
        _ = lengthwise.plans


def test_costs_come_from_a_model_or_from_a_file(tmp_path) -> None:
    (tmp_path / "cost.json").write_text(json.dumps({"linear_seconds": 1.0}))
    plan = lengthwise.plan(
        [3, 4], lengthwise.Cluster(ranks=1, capacity_tokens=9), lengthwise.costs(file=tmp_path / "cost.json")
    )
    assert plan.notes["predicted_seconds"] == 7
    shape = lengthwise.ModelShape(
        name="x", layers=2, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=8, vocab=9
    )
    assert lengthwise.costs(shape, "cpu", simple=True).version != lengthwise.costs(shape, "cpu").version
    for given in ({}, {"model": "tiny", "file": "x"}):
        with pytest.raises(lengthwise.LengthwiseError, match="one of model and file"):
            lengthwise.costs(**given)
