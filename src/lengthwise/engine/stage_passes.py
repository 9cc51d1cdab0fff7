"""The passes of a step on a stage, and what the stage holds beside each, for `capacity_tokens: auto`.

They come from a step program that keeps as many microbatches as any step may. Only passes that differ are listed, a few
for any number of microbatches. A whole model is one stage, which holds nothing beside a pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lengthwise.core.plan import Microbatch, Piece, Plan
from lengthwise.core.shape import UNCUT, LayerCut
from lengthwise.cost import PassBeside
from lengthwise.engine.stage_messages import UNWAITED_A_STAGE
from lengthwise.program.step_program import Place, step_program


def _full_pipeline(cut: LayerCut) -> Plan:
    """Return a plan of one replica with every pass, whose stages keep as many microbatches as they ever may."""
    number, schedule = 1, {"kind": "free"}
    if cut != UNCUT:
        number, schedule = 3 * cut.stages, {"kind": "pipeline", "stages": cut.stages, "virtual": cut.virtual}
    return Plan(
        ranks=1,
        layers=cut.chunks,
        capacity=1,
        tokens=(1,) * number,
        microbatches=tuple(Microbatch(pieces=(Piece(ranks=(0,), sequences=(each,)),)) for each in range(number)),
        schedule=schedule,
    )


def passes_of(cut: LayerCut, stage: int) -> list[PassBeside]:
    """List the passes of a training stage, with the tensors that it holds beside them."""
    found = dict[PassBeside, None]()
    kept, returned, posted = set[Place](), set[Place](), list[_Posted]()
    for turn in step_program(_full_pipeline(cut), 0, stage).turns:
        action = turn.action
        if action is not None:
            place = action.place
            for each in posted:
                each.take((place, action.is_forward))
            kept.discard(place)
            returned.discard(place)
            beside = PassBeside(
                chunk=place.chunk,
                is_forward=action.is_forward,
                kept=tuple(sorted(Counter(each.chunk for each in kept).items())),
                returned=tuple(sorted(each.chunk for each in returned)),
                hidden=sum(each.num_sends + len(each.arriving) for each in posted),
            )
            found[beside] = None
            if action.is_forward:
                kept.add(place)
            if action.reads_ahead is not None and action.reads_ahead in kept:
                returned.add(action.reads_ahead)
        if turn.sends or turn.receives:
            posted.append(_Posted(len(turn.sends), {(each.place, each.is_forward) for each in turn.receives}))
            for each in posted[: -UNWAITED_A_STAGE * cut.stages]:
                each.num_sends = 0
    return list(found)


@dataclass(slots=True)
class _Posted:
    """A grouped call of messages: number of sends that it still holds, and messages that still arrive."""

    num_sends: int
    arriving: set[tuple[Place, bool]]

    def take(self, message: tuple[Place, bool]) -> None:
        """Wait for the call, if it receives this message."""
        if message in self.arriving:
            self.arriving.remove(message)
            self.num_sends = 0
