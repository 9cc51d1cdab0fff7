"""A tiny model under sharded parameters: plans in waves, and a run of one."""

from dataclasses import replace

import torch
from testing import make_batch, tiny_model
from testing.laid import freed_parameters
from testing.plans import in_turn

from lengthwise.attention import choose_kernel
from lengthwise.comm import Lone, Mesh
from lengthwise.core.plan import Piece
from lengthwise.engine.step import StepContext, run_part
from lengthwise.models import keep_double, wrapped_layers

CPU = torch.device("cpu")
LENGTHS = (41, 11, 5, 7, 1, 23)
# A ring beside nothing, a ring beside a pack, and a wave of which ranks 0 and 1 have nothing.
WAVES = [
    [Piece(ranks=(0, 2, 1), sequences=(0,))],
    [Piece(ranks=(0, 1), sequences=(5,)), Piece(ranks=(2,), sequences=(1, 2))],
    [Piece(ranks=(2,), sequences=(3, 4))],
]
# On nodes of 2: a ring over both; a pack on each alone; a ring over both that the second then ends with, the first not.
WAVES_OF_NODES = [
    [Piece(ranks=(0, 2, 1), sequences=(0,))],
    [Piece(ranks=(3,), sequences=(1,))],
    [Piece(ranks=(1,), sequences=(2, 3))],
    [Piece(ranks=(2, 0), sequences=(5,))],
    [Piece(ranks=(0,), sequences=(4,))],
]
KINDS = ("none", "layer", "all_but_attention", "elementwise", "elementwise+1/2")


class OneOfSame(Lone):
    """One of ranks that all have the same slices, the others nothing to add."""

    def all_gather(self, output, source):
        output.view(self.world_size, -1).copy_(source)

    def reduce_scatter(self, output, source):
        output.copy_(source.view(self.world_size, -1)[0])


def in_waves(plan, *recompute):
    plan, requires = in_turn(plan, recompute=recompute or ("none",)), tuple(sorted({*plan.requires, "waves"}))
    return replace(plan, schedule={"kind": "waves"}, requires=requires)


def build(family="llama", **changes):
    return tiny_model(family, changes)


def shard(model, transport, dtype=torch.float64, ranks_per_node=None, exact_on=None, casts_to=None):
    options = {"dtype": dtype, "device": CPU, "layers": wrapped_layers(model), "ranks_per_node": ranks_per_node}
    return freed_parameters(model, transport, exact_on=exact_on, casts_to=casts_to, **options)


def run(model, parameters, transport, plan, lengths=LENGTHS, dtype=torch.float64, **options):
    batch = make_batch(lengths, vocab=model.config.vocab_size)
    with keep_double(dtype):
        options = {"name": "step", "parameters": parameters, **options}
        return run_part(plan, batch, StepContext(model, Mesh(transport, 1), choose_kernel(CPU), **options))
