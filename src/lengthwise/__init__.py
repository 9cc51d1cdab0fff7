"""Lengthwise trains language models on sequences of very different lengths with Hybrid Data Parallelism.

    import lengthwise

    cost = lengthwise.costs("llama-7b", "h100")
    cluster = lengthwise.Cluster(ranks=8, capacity_tokens=32_768)
    plan = lengthwise.plan([131_072, 9_000, 800], cluster, cost)
    print(lengthwise.score(plan, cost).makespan_seconds)

Every name of `__all__` is imported when it is first asked for: only `Session`, `StoredModel`, `train`, `verify` and
what they return need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lengthwise.core import __version__ as __version__

if TYPE_CHECKING:
    from lengthwise.config import RunConfig, build_config, load_config
    from lengthwise.core.errors import LengthwiseError, Problems
    from lengthwise.core.plan import Microbatch, Piece, Plan
    from lengthwise.core.shape import Cluster, ModelShape
    from lengthwise.core.timeline import Timeline
    from lengthwise.cost import Cost, Hardware, costs
    from lengthwise.models.stored_model import StoredModel
    from lengthwise.planner import PlanOptions, PlanRequest, Score, register_planner, score
    from lengthwise.planner import plan_step as plan
    from lengthwise.program import check_plan as check
    from lengthwise.run.api import train, verify
    from lengthwise.run.callbacks import Callback, TrainResult
    from lengthwise.run.prepared_run import Run
    from lengthwise.run.verify import VerifyReport
    from lengthwise.session import Session, StepResult
    from lengthwise.simulator import simulate_plan as simulate

    options = PlanOptions

__all__ = [
    "Callback",
    "Cluster",
    "Cost",
    "Hardware",
    "LengthwiseError",
    "Microbatch",
    "ModelShape",
    "Piece",
    "Plan",
    "PlanOptions",
    "PlanRequest",
    "Problems",
    "Run",
    "RunConfig",
    "Score",
    "Session",
    "StepResult",
    "StoredModel",
    "Timeline",
    "TrainResult",
    "VerifyReport",
    "build_config",
    "check",
    "costs",
    "load_config",
    "options",
    "plan",
    "register_planner",
    "score",
    "simulate",
    "train",
    "verify",
]

# Where each name lives; after =, what it is called there.
_HOMES = {
    name.partition("=")[0]: (module, name.partition("=")[2] or name)
    for module, names in {
        "config": "RunConfig build_config load_config",
        "core.errors": "LengthwiseError Problems",
        "core.plan": "Microbatch Piece Plan",
        "core.shape": "Cluster ModelShape",
        "core.timeline": "Timeline",
        "cost": "Cost Hardware costs",
        "models.stored_model": "StoredModel",
        "planner": "PlanOptions PlanRequest Score options=PlanOptions plan=plan_step register_planner score",
        "program": "check=check_plan",
        "simulator": "simulate=simulate_plan",
        "session": "Session StepResult",
        "run.api": "train verify",
        "run.callbacks": "Callback TrainResult",
        "run.prepared_run": "Run",
        "run.verify": "VerifyReport",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lengthwise' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _HOMES[name]
    try:
        globals()[name] = value = getattr(import_module(f"lengthwise.{module}"), attribute)
    except ModuleNotFoundError as error:
        from lengthwise.core.names import missing_package

        if (missing := missing_package(error)) is None:
            raise
        raise ImportError(f"lengthwise.{name}: {missing}. Install them as the README says.") from error
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
