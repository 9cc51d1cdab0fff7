"""Ranks as replicas and stages: collectives along the replicas of a stage, transfers of the world."""

import pytest
import torch
from testing import run_ranks
from testing.strict import StrictWorld

from lengthwise.comm import Mesh


def work(world):
    """Return what each collective along the replicas gives, and what came from the replica before."""
    mesh = Mesh(world, 2)
    own, size = torch.full((3,), float(world.rank)), mesh.num_replicas
    total, gathered, part, first = own.clone(), torch.empty(3 * size), torch.empty(1), own.clone()
    mesh.replicas.all_reduce(total)
    mesh.replicas.all_gather(gathered, own)
    mesh.replicas.reduce_scatter(part, torch.arange(size, dtype=torch.float32) + world.rank)
    mesh.replicas.broadcast(first, 1)
    came = torch.empty(3)
    after, before = (mesh.replica + 1) % size, (mesh.replica - 1) % size
    mesh.replicas.exchange([(own, after)], [(came, before)]).wait()
    other = torch.empty(3)
    mesh.between.exchange(*([(each, mesh.rank_of_stage(1 - mesh.stage))] for each in (own, other))).wait()
    everyone = torch.ones(1)
    world.all_reduce(everyone)
    return [each.tolist() for each in (total, gathered, part, first, came, other, everyone)]


def expected(rank):
    stage, replica = rank % 2, rank // 2
    ranks = [stage, 2 + stage, 4 + stage]
    return [
        [float(sum(ranks))] * 3,
        [float(each) for each in ranks for _ in range(3)],
        [float(3 * replica + sum(ranks))],
        [float(ranks[1])] * 3,
        [float(ranks[(replica - 1) % 3])] * 3,
        [float(rank - stage + (1 - stage))] * 3,
        [6.0],
    ]


@pytest.mark.parametrize("run", [run_ranks, lambda work, ranks: StrictWorld(ranks).run(work)], ids=["gloo", "strict"])
def test_a_stages_replicas_are_a_world_of_their_own(run):
    assert run(work, 6) == [expected(rank) for rank in range(6)]
