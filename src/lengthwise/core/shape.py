"""What a plan needs to know of a cluster and of a model: a few numbers, no weights and no devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from lengthwise.core.errors import ConfigError
from lengthwise.core.sizes import read_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`ranks` replicas of the model, each holding at most `capacity_tokens` of one microbatch."""

    ranks: int
    capacity_tokens: int

    def __post_init__(self) -> None:
        for name in ("ranks", "capacity_tokens"):
            object.__setattr__(self, name, read_whole(name, getattr(self, name)))  # an int, whatever NumPy gave

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that any plan can hold."""
        return self.ranks * self.capacity_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer from which FLOPs and bytes follow.

    intermediate: width of one expert's (or the only) gated MLP; `experts_per_token` of `experts` are active.
    windows: (sliding window in tokens, layers that have it); all other layers see everything.
    family: the config's kind of model, where known; it does not count in comparisons.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 1
    experts_per_token: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    family: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                where, remedy = f"model {self.name}: {name}", "Correct the model's config.json."
                raise ConfigError(where, expected="a whole number of at least 1", got=repr(value), remedy=remedy)

    @property
    def window_shares(self) -> tuple[tuple[int, float], ...]:
        """(sliding window in tokens, share of the layers that have it), as costs count them."""
        return tuple((window, layers / self.layers) for window, layers in self.windows)

    @property
    def linear_params(self) -> int:
        """Active parameters in matrix products for one token, output head included, input embedding left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * self.experts_per_token
        return self.layers * (attention + mlp) + self.hidden * self.vocab

    @property
    def total_params(self) -> int:
        """Parameters in all, every expert, input embedding and output head included."""
        idle = 3 * self.hidden * self.intermediate * (self.experts - self.experts_per_token)
        return self.linear_params + self.layers * idle + self.hidden * self.vocab
