"""The parts in their order: the limit of each, and how long it should take, by arithmetic.

Rates are below what is hoped for, starts are those of a cold disk; nothing here was measured on a GPU. A part whose
estimate is near its limit would be cut on a slower machine, so a test holds estimates under `MARGIN` of the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpu.many import CONFIGURATIONS
from gpu.replay import WAVES
from gpu.setting import BatchKind, Sizes, linear_flops, model_config, step_flops
from gpu.steps import COMPILED, turns_of
from lengthwise.cost import shape_from_config

MARGIN = 0.85
START_SECONDS = 20.0  # of a process: imports from a cold disk, CUDA
COMMAND_SECONDS = 15.0  # of a command: imports from memory, ranks, a small model
CASE_SECONDS = 1.0  # of a test on tensors
LINEAR_FLOPS, ATTENTION_FLOPS = 4e14, 2.5e14  # a second, of eager layers in bf16
BUILD_SECONDS = 3.0  # of a model, a billion parameters
FIRST_SECONDS = 3.0  # of a loop's first step beyond those that follow: libraries, plans of cuDNN
COMPILE_SECONDS = 90.0
_AGAIN = 4 / 3  # of the work where layers are computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A table, or a file of tests/gpu. estimate: of its seconds, by the sizes. decides: what its rows are for."""

    limit_seconds: float
    estimate: Callable[[Sizes], float]
    decides: str


def parameters_of(model: str) -> float:
    """Count the parameters of a shape, in billions."""
    return shape_from_config(model_config(model).to_dict()).total_params / 1e9


def pass_seconds(model: str, lengths: Sequence[int], *, recompute: str = "none") -> float:
    """Estimate forward and backward of documents."""
    config, parameters = model_config(model), round(parameters_of(model) * 1e9)
    linear = linear_flops(config, parameters, lengths)
    attention = step_flops(config, parameters, lengths) - linear
    return (1.0 if recompute == "none" else _AGAIN) * (linear / LINEAR_FLOPS + attention / ATTENTION_FLOPS)


def _batch_seconds(sizes: Sizes, model: str, kind: BatchKind) -> float:
    return (1 + sizes.step_repeats) * pass_seconds(model, kind.lengths(), recompute=kind.recompute)


def _steps(part: str) -> Callable[[Sizes], float]:
    def estimate(sizes: Sizes) -> float:
        total = START_SECONDS
        for turn in turns_of(sizes, part):
            total += BUILD_SECONDS * parameters_of(turn.model) + FIRST_SECONDS
            total += sum(_batch_seconds(sizes, turn.model, kind) for kind in sizes.step_parts[part][turn.model])
            total += COMPILE_SECONDS * (turn.loop == COMPILED)
        return total

    return estimate


def _replay(sizes: Sizes) -> float:
    total = START_SECONDS + BUILD_SECONDS * parameters_of(sizes.replay_model) + sizes.replay_profile_seconds
    for ranks, planners in sizes.replay_plans.items():
        once = pass_seconds(sizes.replay_model, sizes.replay_batch(ranks).lengths())
        total += len(planners) * once * (1 + 1 / ranks)  # the first rank runs twice
    return total


def _replay_waves(sizes: Sizes) -> float:
    total = START_SECONDS + BUILD_SECONDS * parameters_of(sizes.waves_model) + sizes.replay_profile_seconds
    runs = sizes.waves_repeats + 1 / sizes.waves_ranks  # the first rank once more
    return total + len(WAVES) * runs * sum(
        pass_seconds(sizes.waves_model, each.lengths()) for each in sizes.waves_batches
    )


def _trace(sizes: Sizes) -> float:
    model, kind = sizes.traced
    return (
        START_SECONDS
        + BUILD_SECONDS * parameters_of(model)
        + FIRST_SECONDS
        + 2 * pass_seconds(model, kind.lengths())
        + 15
    )


def _ceilings(sizes: Sizes) -> float:
    runs, heads = sizes.repeats + 2, sizes.attention_heads
    products = sum(2 * size**3 for size in sizes.product_sizes) / LINEAR_FLOPS
    attention = 3 * sum(7 * tokens**2 * 128 * heads for tokens in sizes.attention_tokens) / ATTENTION_FLOPS
    return START_SECONDS + runs * (products + attention)


def _profile(sizes: Sizes) -> float:
    return START_SECONDS + len(sizes.profile_models) * (COMMAND_SECONDS + 10 + sizes.profile_seconds)


def _many(_sizes: Sizes) -> float:
    commands = sum(len(each.commands) for each in CONFIGURATIONS.values())
    return START_SECONDS + COMMAND_SECONDS * commands


def _fixed(seconds: float, *, starts: int = 0, cases: int = 0) -> Callable[[Sizes], float]:
    return lambda _: START_SECONDS + seconds + starts * COMMAND_SECONDS + cases * CASE_SECONDS


TABLES: Mapping[str, Part] = {
    "place": Part(limit_seconds=45, estimate=_fixed(2), decides="which versions and clocks all rows have"),
    "ceilings": Part(
        limit_seconds=50, estimate=_ceilings, decides="what share of the device's own rates a step can reach"
    ),
    "blocks": Part(
        limit_seconds=60, estimate=_fixed(15), decides="the curves of hardware.json, and from which lengths cuDNN runs"
    ),
    "parity": Part(
        limit_seconds=60, estimate=_fixed(20), decides="whether rings in bf16 and the chunked loss are right"
    ),
    "profile": Part(
        limit_seconds=130, estimate=_profile, decides="speeds and copies in hardware.json, for heads of 64 and of 128"
    ),
    "many": Part(limit_seconds=280, estimate=_many, decides="whether layouts, stages, offload and trainers run at all"),
    "steps": Part(
        limit_seconds=300, estimate=_steps("steps"), decides="whether a 1B step is as fast as plain Hugging Face's"
    ),
    "steps_64k": Part(limit_seconds=240, estimate=_steps("steps_64k"), decides="the same with a long document"),
    "steps_8b": Part(
        limit_seconds=290,
        estimate=_steps("steps_8b"),
        decides="whether half of the peak is reached on an 8B shape, and if Liger or compile becomes the default",
    ),
    "steps_large": Part(
        limit_seconds=290,
        estimate=_steps("steps_large"),
        decides="whether an 8B and a 3B shape are as fast as plain Hugging Face",
    ),
    "replay_waves": Part(
        limit_seconds=250,
        estimate=_replay_waves,
        decides="the gain over FSDP2's packs and rings of one size, with measured arithmetic",
    ),
    "trace": Part(limit_seconds=75, estimate=_trace, decides="which kernels the seconds of a step are in"),
    "replay": Part(limit_seconds=250, estimate=_replay, decides="whether the simulator's step times are right to 5 %"),
}
"""Parts that write rows; the module of `gpu` that has a function of its name, or `tables`."""
TESTS: Mapping[str, Part] = {
    "test_gpu_kernels": Part(
        limit_seconds=120, estimate=_fixed(0, cases=56), decides="whether attention kernels are right"
    ),
    "test_gpu_nccl": Part(
        limit_seconds=175, estimate=_fixed(5 * 10, starts=5), decides="whether transfers over NCCL work"
    ),
    "test_gpu_engine": Part(
        limit_seconds=40, estimate=_fixed(0, cases=6), decides="whether the engine runs at all, with one wait a step"
    ),
    "test_gpu_offload": Part(
        limit_seconds=40, estimate=_fixed(0, cases=3), decides="whether offload to pinned memory is right"
    ),
    "test_gpu_runs": Part(
        limit_seconds=200, estimate=_fixed(0, starts=9), decides="whether runs on a GPU follow the CPU"
    ),
}
_FIRST = ("place", *TESTS, "many", "ceilings", "blocks", "parity", "profile")
PARTS: Mapping[str, Part] = {name: {**TABLES, **TESTS}[name] for name in (*_FIRST, *TABLES) if name != "replay"} | {
    "replay": TABLES["replay"]
}
"""All, first what is right and then what is fast."""
