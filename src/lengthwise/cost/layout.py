"""How a model and its optimizer lie over ranks: the record behind memory, costs and plans of a step."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.core.errors import ConfigError
from lengthwise.core.shape import UNCUT, LayerCut


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The places of parameters, gradients and optimizer; a rank has a device for each stage of its `cut`.

    ranks: copies of the model among which a step's tokens are cut. shard: layout of the parameters over the ranks:
    zero1, zero3 or hybrid. ranks_per_node: ranks that shard them under hybrid, None for all. parameters: number of all
    parameters, tied ones once (default: those of the shape). trained: number of trained ones (default: all); the others
    are a base under adapters. states: optimizer states per parameter. offloads: True with states and master weights in
    host memory. ties: True if head and embedding are the same (default: as usual in the family). quantization: kind of
    the frozen linear layers: nf4, fp4, int8, or None. frozen_bytes: bytes of all frozen parameters, if quantized
    (default: by the shape). layer_bytes: mean bytes of a layer's parameter when ranks gather it, where mixed precision
    casts some (default: those of the model's).
    """

    ranks: int = 1
    cut: LayerCut = UNCUT
    shard: str = "zero1"
    ranks_per_node: int | None = None
    parameters: int | None = None
    trained: int | None = None
    states: int = 2
    offloads: bool = False
    ties: bool | None = None
    quantization: str | None = None
    frozen_bytes: int | None = None
    layer_bytes: float | None = None

    @property
    def devices(self) -> int:
        """Devices of a rank."""
        return self.cut.stages

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the parameters."""
        return self.shard != "zero1" and self.ranks > 1

    @property
    def node(self) -> int:
        """The ranks that shard the parameters, if they are sharded."""
        return self.ranks_per_node or self.ranks if self.shard == "hybrid" else self.ranks

    @property
    def ranks_in_step(self) -> int:
        """The number of neighbouring ranks that shard the parameters, and so run in lock-step."""
        return min(self.node, self.ranks) if self.is_sharded else 1


def ranks_of_node(asked: int | None, here: int, ranks: int, *, is_asked: bool) -> int | None:
    """Return how many ranks shard the parameters under hybrid: `asked`, else the ranks of this machine.

    Return None if hybrid is not asked for and this machine's ranks do not divide all ranks.

    Raises:
        ConfigError: the number does not divide the ranks.
    """
    found = asked or here
    if ranks % found == 0:
        return found
    if asked is None and not is_asked:
        return None
    got = f"{found}" if asked else f"{found}, the ranks of this machine"
    remedy = "Set ranks_per_node, or take another shard."
    raise ConfigError("ranks_per_node", expected=f"a number that divides {ranks} ranks", got=got, remedy=remedy)
