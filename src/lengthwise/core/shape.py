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
class LayerCut:
    """How the layers of a rank are cut: into `stages` pipeline stages, a device each, of `virtual` chunks each."""

    stages: int = 1
    virtual: int = 1

    @property
    def chunks(self) -> int:
        """Chunks of layers of a rank, over all its stages."""
        return self.stages * self.virtual

    @property
    def fill(self) -> float:
        """How long a rank waits for its stages, in times of a first and a last microbatch."""
        return (self.stages - 1) / self.virtual

    @property
    def microbatches_kept(self) -> float:
        """Of how many microbatches the first stage keeps activations at most: 1F1B, interleaved or not."""
        return self.stages if self.virtual == 1 else self.stages + self.fill


UNCUT = LayerCut()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer from which FLOPs and bytes follow.

    intermediate: width of one expert's (or the only) MLP; `experts_per_token` of `experts` are active. gated: whether
    MLPs have a gate, so three matrices and not two.
    dense_width: of the MLPs that every token passes beside experts, shared ones and those of layers without, in all.
    windows: (sliding window in tokens, layers that have it); all other layers see everything.
    full_head_dim, full_kv_heads: of layers without a window, where theirs differ.
    attention_layers, mlp_layers: that attend, and that have experts or the only MLP; None: all.
    attention_params: in projections, of all layers that attend; None: of plain heads.
    lookup_params: of embeddings that layers look up beside the input's.
    mixer_params: in matrix products of the rest that mixes tokens. scan_flops: of its scans, forward, a token.
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
    full_head_dim: int | None = None
    full_kv_heads: int | None = None
    attention_layers: int | None = None
    mlp_layers: int | None = None
    gated: bool = True
    dense_width: int = 0
    attention_params: int | None = None
    lookup_params: int = 0
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
        """(sliding window in tokens, share of the work of layers that attend), as costs count them."""
        width = self.heads * self.head_dim
        return tuple((window, layers * width / self.query_width) for window, layers in self.windows)

    @property
    def num_attention(self) -> int:
        """Layers that attend."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def query_width(self) -> int:
        """Heads times head size, in all layers that attend."""
        return self.heads * (self._windowed * self.head_dim + self._full * (self.full_head_dim or self.head_dim))

    @property
    def key_width(self) -> int:
        """KV heads times head size, in all layers that attend."""
        full = (self.full_kv_heads or self.kv_heads) * (self.full_head_dim or self.head_dim)
        return self._windowed * self.kv_heads * self.head_dim + self._full * full

    @property
    def _windowed(self) -> int:
        return sum(layers for _, layers in self.windows)

    @property
    def _full(self) -> int:
        return self.num_attention - self._windowed

    @property
    def mlp_width(self) -> int:
        """Widths of all MLPs that a token passes, in all layers."""
        return self.num_mlp * self.intermediate * self.experts_per_token + self.dense_width

    @property
    def linear_params(self) -> int:
        """Active parameters in matrix products for one token, output head included, input embedding left out."""
        attention = self.attention_params
        if attention is None:
            attention = 2 * self.hidden * (self.query_width + self.key_width)
        return attention + self._matrices * self.hidden * self.mlp_width + self.mixer_params + self.hidden * self.vocab

    @property
    def total_params(self) -> int:
        """Parameters in all, every expert, input embedding and output head included."""
        idle = self.num_mlp * self.intermediate * (self.experts - self.experts_per_token)
        tables = self.hidden * self.vocab + self.lookup_params
        return self.linear_params + self._matrices * self.hidden * idle + tables

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def num_mlp(self) -> int:
        """Layers with experts, or the only MLP."""
        return self.layers if self.mlp_layers is None else self.mlp_layers
