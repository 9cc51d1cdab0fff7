"""The peak bytes of a rank in a step, by formulas from a model's shape: where nothing runs and nothing can be measured.

States as `engine.replicated` and AdamW keep them. Of a layer: what Hugging Face's operations save for backward, tensor
by tensor; each family's norms and MLP are listed here, others are counted as a Llama's. Beside that, at the turn from
forward to backward the loss, then the gradients of one layer. Held to what steps take by `benchmarks/memory_model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.core.held import kept_ratio
from lengthwise.core.shape import ModelShape
from lengthwise.cost.memory import PRECISION_BYTES, loss_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What a step of a model on one of `ranks` is, beside its tokens.

    parameters: all of them, tied ones once. trained: how many of them; None: all. Others are a base under adapters.
    """

    shape: ModelShape
    parameters: int
    trained: int | None = None
    ranks: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    logits_at_once: int | None = None

    def state_bytes(self) -> float:
        """Count parameters, gradients, and the slices of master weights, reduced gradients and moments."""
        narrow, wide = PRECISION_BYTES[self.precision]
        trained = self.parameters if self.trained is None else self.trained
        copies = 4.0 * wide / self.ranks
        if self.ranks == 1:  # its slices are the buffers themselves
            copies = 2.0 * wide + (wide if narrow != wide else 0)
        return self.parameters * narrow + trained * (wide + copies)

    def peak_bytes(self, tokens: int, offload: float = 0.0) -> float:
        """Return the peak with one microbatch of so many tokens on the rank."""
        narrow, wide = PRECISION_BYTES[self.precision]
        shape, layer = self.shape, _layer_bytes(self.shape, narrow, wide)
        if self.trained is not None:  # norms whose weights stay need not keep what they multiply
            layer -= narrow * _kind(shape).norms * shape.hidden
        attention = narrow * shape.heads * shape.head_dim + wide * shape.heads
        of_layer = {
            "none": layer,
            "all_but_attention": narrow * shape.hidden + attention,
            "layer": narrow * shape.hidden,
        }
        saved = shape.layers * of_layer[self.recompute] * tokens
        trains_head, at_once = self.trained is None, self.logits_at_once
        loss = loss_bytes(shape, tokens, narrow=narrow, wide=wide, logits_at_once=at_once, trains_head=trains_head)
        norm = _norm_bytes(_kind(shape), narrow, wide) * shape.hidden * tokens
        again = 0.0 if self.recompute == "none" else layer
        gradients = narrow * (3 * shape.intermediate * shape.experts_per_token + 2 * shape.hidden)
        turn = saved * kept_ratio(offload, shape.layers) + max(norm + loss, (again + gradients) * tokens)
        return self.state_bytes() + turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What a family's layer has: norms before and after its parts, norms of heads, and widths that its MLP keeps.

    widely: its norms scale in fp32.
    """

    norms: int = 2
    norms_after: int = 0
    norms_heads: bool = False
    mlp_widths: int = 4  # gate, up, what the gate becomes and their product
    widely: bool = False


_KINDS = {
    "qwen3": _Kind(norms_heads=True),
    "qwen3_moe": _Kind(norms_heads=True),
    "gemma3_text": _Kind(norms_after=2, norms_heads=True, widely=True),
    "gpt_oss": _Kind(mlp_widths=8),
}


def _kind(shape: ModelShape) -> _Kind:
    return _KINDS.get(shape.name, _Kind())


def _norm_bytes(kind: _Kind, narrow: int, wide: int, *, result: bool = True) -> int:
    """Count what a norm keeps of each number: its input in fp32, that normed and, for a product, the result."""
    return wide + (wide if kind.widely else narrow) + (narrow if result else 0)


def _layer_bytes(shape: ModelShape, narrow: int, wide: int) -> float:
    """Count what one layer saves of a token."""
    kind, queries, keys = _kind(shape), shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = kind.norms * _norm_bytes(kind, narrow, wide) * shape.hidden
    bare = _norm_bytes(kind, narrow, wide, result=False)
    kept += kind.norms_after * bare * shape.hidden
    kept += bare * (queries + keys) if kind.norms_heads else 0
    kept += narrow * 2 * (queries + keys) + wide * shape.heads  # q, k, v, the result and its log-sum-exp
    kept += narrow * kind.mlp_widths * shape.intermediate * shape.experts_per_token
    # Tokens are copied to their experts, and results kept for the gradient of the routing weights.
    return float(kept + (narrow * 2 * shape.hidden * shape.experts_per_token if shape.experts > 1 else 0))
