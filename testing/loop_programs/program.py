"""Random programs of a training loop's operations, as plain data, drawn from a seed.

A program says what a user's loop does, on which ranks and in which layout. `OPERATIONS` says of each operation how
often it is drawn and whether a session may refuse it, and in which layouts; where it may not, the plain loop's result
is promised.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Rules = Literal[
    "equal", "may", "must"
]  # what a session promises: the plain loop's result, that or a refusal, a refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Options of a session and how many ranks it may have. capacity: tokens of a rank in a microbatch."""

    options: Mapping[str, Any]
    ranks: Sequence[int]
    capacity: int = 24  # below the longest sequence, so that it is cut

    @property
    def is_whole(self) -> bool:
        """Whether each rank's model has all its parameters between steps."""
        return self.options.get("shard") == "zero1"

    @property
    def is_cut(self) -> bool:
        """Whether a rank's model has no values between steps."""
        return self.options.get("shard") in ("zero3", "hybrid")


_HOST = {"offload_optimizer": True}
LAYOUTS: Mapping[str, Layout] = {
    "zero1": Layout(options={"shard": "zero1"}, ranks=(1, 2, 3)),
    "zero1 on the host": Layout(options={"shard": "zero1", **_HOST}, ranks=(1, 2, 3)),
    "zero3": Layout(options={"shard": "zero3"}, ranks=(2, 3)),
    "zero3 on the host": Layout(options={"shard": "zero3", **_HOST}, ranks=(2,)),
    "hybrid": Layout(options={"shard": "hybrid", "ranks_per_node": 1}, ranks=(2, 3)),
    "stages": Layout(options={"stages": 2}, ranks=(2,), capacity=64),
    "stages on the host": Layout(options={"stages": 2, **_HOST}, ranks=(2,), capacity=64),
    "hybrid of 2": Layout(options={"shard": "hybrid", "ranks_per_node": 2}, ranks=(4,)),
    "stages of 2 replicas": Layout(options={"stages": 2}, ranks=(4,), capacity=64),
}
MODELS = ("untied", "tied", "unreached", "adapters", "own loss", "own forward", "sharing", "adapters of experts")
OPTIMIZERS = ("sgd", "adamw")
LOSSES = ("next token", "squares", "compute_loss", "by sequence")
PLACES = ("loss", "compute_loss", "values", "combine", "combine, of weights")  # of a parameter in a loss
NAMES = ("norm", "embed_tokens", "lm_head", "layers.0", "q_proj", "")  # of parameters, in part


@dataclass(frozen=True, slots=True)
class Operation:
    """What a loop does: the name of a method of `loops.Loop`, and its arguments."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.arguments.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A loop's operations on so many ranks. early_hook: of the optimizer, registered before the session is made."""

    ranks: int
    layout: str
    model: str
    optimizer: str
    early_hook: str | None = None
    operations: tuple[Operation, ...]

    def to_json(self) -> str:
        """Return it in one line."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "operations"}
        return json.dumps({**values, "operations": [[each.name, dict(each.arguments)] for each in self.operations]})

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Return the program that `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "operations": tuple(Operation(*each) for each in values["operations"])})

    def __str__(self) -> str:
        early = f", hook {self.early_hook} step registered before the session" if self.early_hook else ""
        first = f"{self.ranks} ranks, {self.layout}, model {self.model}, {self.optimizer}{early}"
        return "\n".join([first, *(f"  {number}: {each}" for number, each in enumerate(self.operations))])


Draw = Callable[[random.Random], dict[str, Any]]
_WHOLE = "whole"  # equal where the model has all parameters between steps, else it may be refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How an operation is drawn and what a session promises of it.

    place: in a step: "open" (before a backward), "gradients" (after one), "closed" (after the update). weight: of how
    often. rule: see `Rules`; "whole": as `_WHOLE` says.
    """

    draw: Draw
    places: str
    weight: float
    rule: Literal["equal", "may", "must", "whole"] = "equal"

    def rule_in(self, layout: str) -> Rules:
        """Return what a session in a layout promises."""
        if self.rule == _WHOLE:
            return "equal" if LAYOUTS[layout].is_whole else "may"
        return self.rule  # type: ignore[return-value] - `_WHOLE` has returned


def _rows(draw: random.Random) -> dict[str, Any]:
    lengths = [draw.choice((3, 8, 17, 31, 40)), *(draw.choice((1, 2, 5, 9, 16, 33)) for _ in range(draw.randrange(4)))]
    return {"lengths": lengths, "seed": draw.randrange(1000)}


def _backward(draw: random.Random) -> dict[str, Any]:
    loss = draw.choices(LOSSES, (6, 2, 1, 1))[0]
    normalizer = draw.choice((None, None, 50.0)) if loss in LOSSES[:2] else None
    return {**_rows(draw), "loss": loss, "normalizer": normalizer}


def _of_parameter(draw: random.Random) -> dict[str, Any]:
    return {**_rows(draw), "where": draw.choice(PLACES)}


def _group(draw: random.Random) -> dict[str, Any]:
    return {"group": draw.choice((None, 0, 1))}  # None: all


def _limit(draw: random.Random) -> dict[str, Any]:
    return {"limit": draw.choice((0.05, 0.3, 1.0, 100.0))}


def _factor(draw: random.Random) -> dict[str, Any]:
    return {"factor": draw.choice((0.5, 0.9, 1.25))}


def _name(draw: random.Random) -> dict[str, Any]:
    return {"name": draw.choice(NAMES)}


def _value(draw: random.Random) -> dict[str, Any]:
    return {"value": draw.choice((None, 0.0, 0.01))}


def _to_none(draw: random.Random) -> dict[str, Any]:
    return {"to_none": draw.random() < 0.5}


def _how_to_write(draw: random.Random) -> dict[str, Any]:
    return {"how": draw.choices(("in place", "clamp", "copy", "foreach"), (4, 4, 1, 1))[0]}


def _how_to_scale(draw: random.Random) -> dict[str, Any]:
    return {"how": draw.choices(("in place", "anew", "foreach"), (4, 1, 1))[0]}


def _hook(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(("pre", "post"))
    return {"when": kind, "what": draw.choice(("weights", "gradients") if kind == "pre" else ("weights",))}


def _alone(draw: random.Random) -> dict[str, Any]:
    return {"rank": draw.randrange(8), "what": draw.choice(ALONE)}


ALONE = ("lr", "limit", "weights of groups", "weights by name", "gradients of groups", "zero_grad")


def _of(*draws: Draw) -> Draw:
    return lambda draw: {key: value for each in draws for key, value in each(draw).items()}


OPERATIONS: Mapping[str, Kind] = {
    "backward": Kind(draw=_backward, places="gradients", weight=8),
    "clip": Kind(draw=_limit, places="gradients", weight=8),
    "scale_groups": Kind(draw=_of(_group, _factor, _how_to_scale), places="gradients", weight=4),
    "clip_values_of_groups": Kind(draw=_of(_group, _limit), places="gradients", weight=1, rule="may"),
    "set_gradients_of_groups": Kind(draw=_of(_group, _value), places="open gradients", weight=2),
    "zero_grad": Kind(draw=_to_none, places="gradients closed", weight=4),
    "zero_grad_of_model": Kind(draw=_to_none, places="gradients closed", weight=2),
    "step": Kind(draw=lambda _: {}, places="open closed", weight=2),
    "scale_lr": Kind(draw=_of(_group, _factor), places="open gradients closed", weight=3),
    "scheduler_step": Kind(draw=lambda _: {}, places="closed", weight=4),
    "evaluate": Kind(draw=_rows, places="open gradients closed", weight=4),
    "reload": Kind(draw=lambda _: {}, places="closed", weight=2),
    "write_named": Kind(draw=_of(_name, _how_to_write), places="open gradients closed", weight=3, rule="whole"),
    "load_model": Kind(draw=_factor, places="open closed", weight=1.5, rule="whole"),
    "swap_named": Kind(draw=_rows, places="open closed", weight=1.5, rule="whole"),
    "swap_groups": Kind(draw=_rows, places="open closed", weight=1.5, rule="may"),
    "write_groups": Kind(draw=_of(_group, _how_to_write), places="open gradients closed", weight=2.5, rule="may"),
    "hook": Kind(draw=_hook, places="open", weight=1.5, rule="may"),
    "clip_groups": Kind(draw=_of(_group, _limit), places="gradients", weight=2, rule="may"),
    "clip_model": Kind(draw=_limit, places="gradients", weight=1, rule="may"),
    "set_gradients_named": Kind(draw=_of(_name, _value), places="gradients", weight=2, rule="may"),
    "backward_of_model": Kind(draw=_rows, places="open gradients", weight=1.5, rule="may"),
    "backward_with_parameter": Kind(draw=_of_parameter, places="open gradients", weight=1.5, rule="may"),
    "backward_of_weights": Kind(draw=_name, places="open gradients", weight=1.5, rule="may"),
    "evaluate_elsewhere": Kind(draw=_rows, places="gradients closed", weight=1.2, rule="may"),
    "freeze": Kind(draw=_name, places="open closed", weight=0.6, rule="must"),
    "alone": Kind(draw=_alone, places="open gradients", weight=1, rule="must"),
    "forget_states": Kind(draw=lambda _: {}, places="closed", weight=0),
    "fail": Kind(draw=lambda _: {}, places="gradients", weight=0),
}
"""All operations; add a row here and a method of the same name in `loops.Loop`."""
_BOLD = 0.4  # of the programs have operations that may be refused, which would end most of them early
ENDS_TAINT = "step"  # a refusal of an operation may come until this one has used what it left


def draw_program(seed: int, *, most_ranks: int = 3) -> Program:
    """Return the program of a seed."""
    draw = random.Random(seed)
    ranks = 1 + seed % most_ranks
    layout = draw.choice([name for name, each in LAYOUTS.items() if ranks in each.ranks])
    model = draw.choices(MODELS, (4, 4, 2, 1, 1, 1, 1, 1))[0]
    is_bold, operations = draw.random() < _BOLD, list[Operation]()
    for _ in range(draw.randint(1, 3)):
        operations += _draw_step(draw, {n: k for n, k in OPERATIONS.items() if is_bold or k.rule_in(layout) == "equal"})
    ending = next((number for number, each in enumerate(operations) if rule_of(each, layout) == "must"), None)
    if ending is not None:  # a refusal ends a program: what it needs comes right before, what shows the harm after
        refused = operations[ending]
        if refused.arguments.get("what") == "weights by name" and LAYOUTS[layout].is_cut:
            refused = Operation(refused.name, {**refused.arguments, "what": "weights of groups"})  # no others there
        operations = [*operations[:ending], _next_token(draw), refused, *_tail(draw)]
    early_hook = draw.choice(("pre", "post")) if is_bold and draw.random() < 0.1 else None
    program = Program(
        ranks=ranks,
        layout=layout,
        model="untied" if "adapters" in model and "stages" in layout else model,
        optimizer=draw.choice(OPTIMIZERS),
        early_hook=early_hook,
        operations=tuple(operations),
    )
    return program if is_sound(program) else replace(program, operations=_without_alone(program))


def _draw_step(draw: random.Random, kinds: Mapping[str, Kind]) -> list[Operation]:
    return [
        *_drawn(draw, kinds, "open", (0, 0, 1)),
        Operation("backward", _backward(draw)),
        *_drawn(draw, kinds, "gradients", (0, 1, 2, 3)),
        *([Operation("clip", _limit(draw))] if draw.random() < 0.5 else ()),
        Operation("step", {}),
        *([Operation("zero_grad", {"to_none": True})] if draw.random() < 0.8 else ()),
        *_drawn(draw, kinds, "closed", (0, 1, 2)),
    ]


def _drawn(draw: random.Random, kinds: Mapping[str, Kind], place: str, counts: Sequence[int]) -> list[Operation]:
    kinds = {name: kind for name, kind in kinds.items() if place in kind.places.split()}
    names = draw.choices(list(kinds), [kind.weight for kind in kinds.values()], k=draw.choice(counts))
    return [Operation(name, kinds[name].draw(draw)) for name in names]


def _tail(draw: random.Random) -> list[Operation]:
    backward = _next_token(draw)
    return [backward, Operation("clip", {"limit": 1.0}), Operation("step", {}), backward, Operation("step", {})]


def _next_token(draw: random.Random) -> Operation:
    return Operation("backward", {**_rows(draw), "loss": LOSSES[0], "normalizer": None})


def _without_alone(program: Program) -> tuple[Operation, ...]:
    return tuple(each for each in program.operations if each.name != "alone")


def rule_of(operation: Operation, layout: str) -> Rules:
    """Return what a session in a layout promises of an operation."""
    return OPERATIONS[operation.name].rule_in(layout)


def refuses_start(program: Program) -> bool:
    """Whether no session may begin: its stages would have copies of what their layers share."""
    return program.model == "sharing" and "stages" in program.layout


def first_refused(program: Program) -> int:
    """Return the place of the first operation that must be refused; the number of operations where there is none."""
    if refuses_start(program):
        return 0
    rules = [rule_of(each, program.layout) for each in program.operations]
    return rules.index("must") if "must" in rules else len(rules)


def is_sound(program: Program) -> bool:
    """Whether a program means what its rules judge: one that must be refused can be, and shows its harm."""
    names, place = [each.name for each in program.operations], first_refused(program)
    if place == len(names) or refuses_start(program):
        return True
    before, after = names[max(0, place - 1) : place], iter(names[place + 1 :])
    shows = all(name in after for name in ("backward", "clip", "step", "backward", "step"))
    return before == ["backward"] and shows and (program.ranks > 1 or names[place] != "alone")


def refusable_at(program: Program, place: int) -> bool:
    """Whether a refusal at an operation is allowed: it or what is not yet used up may be refused.

    place: of the operation in the program.
    """
    if refuses_start(program):
        return place == 0
    if program.early_hook is not None:
        return True
    for each in reversed(program.operations[: place + 1]):
        if rule_of(each, program.layout) != "equal":
            return True
        if each.name == ENDS_TAINT and each is not program.operations[place]:
            break
    return any(each.name == "hook" for each in program.operations[: place + 1])
