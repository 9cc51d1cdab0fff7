"""What planning needs of a cluster and of a model: a few numbers, no weights and no devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from lengthwise.core.errors import ConfigError
from lengthwise.core.sizes import read_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`ranks` replicas of the model; each holds at most `capacity_tokens` tokens of one microbatch."""

    ranks: int
    capacity_tokens: int

    def __post_init__(self) -> None:
        for name in ("ranks", "capacity_tokens"):
            object.__setattr__(self, name, read_whole(name, getattr(self, name)))  # NumPy's integers become ints

    @property
    def longest_tokens(self) -> int:
        """Length of the longest sequence that a plan can hold."""
        return self.ranks * self.capacity_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCut:
    """The cut of a rank's layers: `stages` pipeline stages, one per device, of `virtual` chunks each."""

    stages: int = 1
    virtual: int = 1

    @property
    def chunks(self) -> int:
        """Number of chunks of layers of a rank, over all its stages."""
        return self.stages * self.virtual

    @property
    def fill(self) -> float:
        """Pipeline bubble, in units of the mean of a first and a last microbatch's time."""
        return (self.stages - 1) / self.virtual

    @property
    def microbatches_kept(self) -> float:
        """Largest number of microbatches whose activations the first stage keeps under (interleaved) 1F1B."""
        return self.stages if self.virtual == 1 else self.stages + self.fill


UNCUT = LayerCut()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only transformer, from which FLOPs and bytes follow.

    intermediate: width of an expert's MLP, or of the only MLP. experts, experts_per_token: number of experts, and of
    active ones.
    gated: True if MLPs have a gate, so three matrices instead of two.
    dense_width: total width of the MLPs that every token passes beside experts: shared ones, layers without experts.
    windows: (sliding window in tokens, number of layers with it) pairs; all other layers attend to the whole sequence.
    full_head_dim, full_kv_heads: sizes of layers without a window, if they differ.
    attention_layers, mlp_layers: number of layers with attention, and with experts or the only MLP; None for all.
    attention_params: parameters of all attention projections; None for those of plain heads.
    lookup_params: parameters of embeddings that layers look up, beside the input embedding.
    mixer_params: parameters of matrix products that mix tokens without attention. scan_flops: forward FLOPs of their
    scans, per token.
    state_layers: number of layers with states. map_values: numbers that a sweep passes on for one such layer: its state
    and the map of it.
    mixer_kept: numbers that these layers, together, keep per token for backward.
    family: the config's `model_type`, if known; comparisons ignore it.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "strict": True}  # in `Measurements`

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
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("name", "windows", "gated", "family") or (value is None and each.default is None):
                continue
            least = 1 if each.default in (MISSING, 1) or each.name.startswith("full_") else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                where, remedy = f"model {self.name}: {each.name}", "Correct the model's config.json."
                expected = f"a whole number of at least {least}"
                raise ConfigError(where, expected=expected, got=repr(value), remedy=remedy)

    @property
    def window_shares(self) -> tuple[tuple[int, float], ...]:
        """(sliding window in tokens, share of the attention work) pairs, for costs."""
        width = self.heads * self.head_dim
        return tuple((window, layers * width / self.query_width) for window, layers in self.windows)

    @property
    def num_attention(self) -> int:
        """Number of layers with attention."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def query_width(self) -> int:
        """Heads times head size, summed over the layers with attention."""
        return self.heads * (self._windowed * self.head_dim + self._full * (self.full_head_dim or self.head_dim))

    @property
    def key_width(self) -> int:
        """KV heads times head size, summed over the layers with attention."""
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
        """Width of all MLPs that a token passes, summed over layers."""
        return self.num_mlp * self.intermediate * self.experts_per_token + self.dense_width

    @property
    def linear_params(self) -> int:
        """Number of parameters in matrix products for one token: with the output head, without the input embedding."""
        attention = self.attention_params
        if attention is None:
            attention = 2 * self.hidden * (self.query_width + self.key_width)
        return attention + self._matrices * self.hidden * self.mlp_width + self.mixer_params + self.hidden * self.vocab

    @property
    def total_params(self) -> int:
        """Number of all parameters: every expert, the input embedding and the output head."""
        idle = self.num_mlp * self.intermediate * (self.experts - self.experts_per_token)
        tables = self.hidden * self.vocab + self.lookup_params
        return self.linear_params + self._matrices * self.hidden * idle + tables

    @property
    def quantized_params(self) -> int:
        """Number of parameters in linear layers that a quantization packs: not the head, and no experts."""
        experts = self._matrices * self.hidden * self.num_mlp * self.intermediate * self.experts_per_token
        return self.linear_params - self.hidden * self.vocab - experts * (self.experts > 1)

    @property
    def largest_matrix(self) -> int:
        """Number of parameters of the largest linear layer but the head."""
        return self.hidden * max(self.intermediate, self.heads * self.head_dim)

    @property
    def _matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def num_mlp(self) -> int:
        """Number of layers with experts, or with the only MLP."""
        return self.layers if self.mlp_layers is None else self.mlp_layers
