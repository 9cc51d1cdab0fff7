"""Ranks as (replica, stage); the stages of a replica are neighbours, inside a node.

`Mesh.replicas` is a transport whose ranks are the replicas of this rank's stage: transfers use the world's group, in
its order, and collectives run over these replicas alone. `Mesh.between` is for messages between stages: a grouped NCCL
call ends only when both neighbours have reached it, and rings of the next action would wait behind it. The constructor
connects all edges of both. With one stage, all three transports are the world.
"""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.comm.transport import Message, Pending, Transport, TransportWrapper
from lengthwise.program import line_peers
from lengthwise.program.stage_program import rank_of


class Mesh:
    """The place of a rank, `replica` and `stage`, and transports along both axes of `world`.

    The constructor is collective if there are several stages.
    """

    def __init__(self, world: Transport, stages: int) -> None:
        self.world, self.stages = world, stages
        self.num_replicas = world.world_size // stages
        assert self.num_replicas * stages == world.world_size, f"{world.world_size} ranks in {stages} stages"
        self.replica, self.stage = divmod(world.rank, stages)
        self.replicas = self.between = world
        if stages == 1:
            return
        of_stage = [[rank_of(each, stage, stages) for each in range(self.num_replicas)] for stage in range(stages)]
        self.replicas = _Replicas(world, world.among(of_stage), of_stage[self.stage])
        self.between = world.apart()
        self.replicas.connect(line_peers(self.replica, self.num_replicas))
        self.between.connect(sorted(self._peers()))

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head."""
        return self.stage == self.stages - 1

    def rank_of_stage(self, stage: int) -> int:
        """Return the rank of another stage of this replica."""
        return rank_of(self.replica, stage, self.stages)

    def _peers(self) -> set[int]:
        stages = {(self.stage - 1) % self.stages, (self.stage + 1) % self.stages}  # the first one, of the last
        if self.replica == 0:  # its first stage collects data of the others
            stages.update(range(self.stages) if self.is_first else (0,))
        return {self.rank_of_stage(each) for each in stages - {self.stage}}


class _Replicas(TransportWrapper):
    """The replicas of a stage, as ranks 0, 1, .."""

    def __init__(self, world: Transport, collectives: Transport, ranks: Sequence[int]) -> None:
        super().__init__(world)
        self._ranks = ranks
        self.rank, self.world_size = ranks.index(world.rank), len(ranks)
        self.all_reduce, self.broadcast = collectives.all_reduce, collectives.broadcast
        self.reduce_scatter, self.reduce_scatter_async = collectives.reduce_scatter, collectives.reduce_scatter_async
        self.all_gather, self.all_gather_async = collectives.all_gather, collectives.all_gather_async

    def connect(self, peers: Sequence[int]) -> None:
        self._inner.connect([self._ranks[peer] for peer in peers])

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._inner.exchange(
            *([(tensor, self._ranks[peer]) for tensor, peer in each] for each in (sends, receives))
        )

    def close(self) -> None:
        """Leave it open: the world closes it."""
