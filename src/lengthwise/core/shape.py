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
    attention_layers, mlp_layers: that attend, and that have an MLP; None: all. The rest of what mixes tokens:
    mixer_params: parameters in matrix products, of all of it. scan_flops: of its scans, forward, a token.
    state_layers: layers with states; map_values: numbers in the map of one, with its state, that a sweep passes on.
    mixer_kept: numbers of a token that it keeps for backward, of all layers.
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
    attention_layers: int | None = None
    mlp_layers: int | None = None
    mixer_params: int = 0
    scan_flops: int = 0
    state_layers: int = 0
    map_values: int = 0
    mixer_kept: int = 0
    family: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                where, remedy = f"model {self.name}: {name}", "Correct the model's config.json."
                raise ConfigError(where, expected="a whole number of at least 1", got=repr(value), remedy=remedy)

    @property
    def window_shares(self) -> tuple[tuple[int, float], ...]:
        """(sliding window in tokens, share of the layers that attend), as costs count them."""
        return tuple((window, layers / self.num_attention) for window, layers in self.windows)

    @property
    def num_attention(self) -> int:
        """Layers that attend."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def linear_params(self) -> int:
        """Active parameters in matrix products for one token, output head included, input embedding left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * self.experts_per_token
        layers = self.num_attention * attention + self.num_mlp * mlp + self.mixer_params
        return layers + self.hidden * self.vocab

    @property
    def total_params(self) -> int:
        """Parameters in all, every expert, input embedding and output head included."""
        idle = 3 * self.hidden * self.intermediate * (self.experts - self.experts_per_token)
        return self.linear_params + self.num_mlp * idle + self.hidden * self.vocab

    @property
    def num_mlp(self) -> int:
        """Layers with an MLP, or experts."""
        return self.layers if self.mlp_layers is None else self.mlp_layers
