"""Bytes of a step on one device, by formulas from a model's shape, where nothing runs.

States are those that `engine.parameters` and the optimizer keep. A layer counts what its operations save for backward,
tensor by tensor, by family (`_FAMILIES`; others count as Llamas), a layer with states as kernels on GPUs do. On top of
that comes the largest of three moments: the loss, the first norm of backward, and the first MLP of backward with its
layer recomputed. tests/engine/test_engine_measuring.py compares with whole steps; `cost.capacity` counts tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lengthwise.core.held import kept_ratio
from lengthwise.core.plan import RECOMPUTED, kinds_by_layer
from lengthwise.core.shape import ModelShape
from lengthwise.cost.choices import AS_CUT, Choice
from lengthwise.cost.layout import ModelLayout
from lengthwise.cost.links import Numbers
from lengthwise.cost.microbatch import WINDOW_LAYERS

_LOGITS_AT_ONCE = 1 << 25  # tokens x vocabulary: 128 MB in fp32; 256 tokens at 128K words
CHUNK_TOKENS_ON_GPUS = 2048  # at least: smaller chunks add launches and reads of the head (estimated)
_LOGIT_COPIES = 3
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
# Of a weight with its scales: one byte for 64 weights in 4 bits, with an fp32 number for 256 of these.
QUANTIZED_BYTES = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "fp4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1.0}


def wide_bytes(dtype_bytes: int) -> int:
    """Return the bytes of a number in sums and master weights: those of fp32 at least."""
    return max(4, dtype_bytes)


def gathered_bytes(
    layer: float,
    words: float,
    *,
    dtype_bytes: int,
    ranks: int,
    ties: bool,
    trains: bool = True,
    casts: bool = True,
    layer_bytes: float | None = None,
) -> float:
    """Count the bytes that `engine.unit_waves` holds at most beside rows and activations.

    While backward computes a layer, these exist: its values and gradients; the next layer's values, which arrive from a
    rank's row in the same dtype; the wide sum of the layer or head before, whole and as a row. A tied weight stays with
    its gradients; where its two gradients meet, there are three.

    layer, words: parameters of a decoder layer, and of the embedding. ties: True if the head is the embedding; else it
    has as many. ranks: ranks that gather together. casts: True to cast wide rows before the gather (not in hybrid).
    layer_bytes: mean bytes of a gathered parameter of a layer, by default `dtype_bytes`.
    """
    narrow, wide = dtype_bytes, wide_bytes(dtype_bytes)
    one, all_words = (layer_bytes or narrow) * layer, narrow * words  # bytes
    if not trains:
        return 2 * one + all_words if ties else max(2 * one, one + all_words)
    summed, beside = wide * (1 + 1 / ranks), (3 + casts / ranks) * one
    if ties:
        return max(beside + 2 * all_words, 4 * all_words + 2 * one) + summed * layer
    return max(beside + summed * max(layer, words), one + all_words + wide * words)


def logits_at_once(words: int, *, on_gpus: bool) -> int:
    """Return the number of logits (tokens x words) per chunk of the loss."""
    return max(_LOGITS_AT_ONCE, CHUNK_TOKENS_ON_GPUS * words) if on_gpus else _LOGITS_AT_ONCE


def loss_bytes(
    shape: ModelShape, tokens: Numbers, dtype_bytes: int, *, logits_at_once: int | None, trains_head: bool = True
) -> Numbers:
    """Count the bytes that the loss of a microbatch of `tokens` holds at its peak.

    Wide logits three times: their log-softmax and two gradients. A chunked loss holds `logits_at_once` of them (if
    None, all), and the gradients of hidden states and head. While a chunk adds to the head's gradient, that gradient
    exists twice, and the logits once.
    """
    narrow, wide = dtype_bytes, wide_bytes(dtype_bytes)
    logits = np.asarray(tokens) * float(shape.vocab)
    whole = logits * _LOGIT_COPIES * wide
    if logits_at_once is None:
        return whole
    head = shape.hidden * shape.vocab * trains_head
    chunk = max(logits_at_once * _LOGIT_COPIES * wide, narrow * (logits_at_once + head))
    return np.where(logits <= logits_at_once, whole, chunk + head * wide + tokens * (shape.hidden * narrow))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory(ModelLayout):
    """The facts beside its tokens that determine the bytes of a step; `cost.capacity.memory_of` makes it.

    dtype_bytes: bytes of a parameter. logits_at_once: logits per loss chunk, None for all. fused_norms: True if norms
    save input and result in the model's dtype; else the input in fp32 and normed values.
    """

    shape: ModelShape
    dtype_bytes: int = 4
    logits_at_once: int | None = _LOGITS_AT_ONCE
    fused_norms: bool = False

    def state_bytes(self) -> float:
        """Count the bytes that a device keeps from step to step, gradients included."""
        return sum(self.state_parts().values())

    def state_parts(self) -> dict[str, float]:
        """Return the bytes that a device keeps from step to step, by part.

        Sharded: rows of masters, sums and states over all ranks; under hybrid also rows of values and sums over a node;
        of frozen parameters the values alone. With masters and states on the host, the device keeps the values. A
        single rank has its slices in the buffers themselves.
        """
        narrow, wide, ranks = self.dtype_bytes, wide_bytes(self.dtype_bytes), self.ranks
        trained, here = self._trained, not self.offloads
        if self.is_sharded:
            has_own_values, frozen = self.offloads or self.node < ranks, self._parameters - trained
            in_layers = self.layer_params()[0] * self.shape.layers if self.trained is None else 0.0  # not in adapters
            own = narrow * trained - (narrow - (self.layer_bytes or narrow)) * in_layers
            parts = {
                "weights": (narrow * frozen + has_own_values * own) / self.node + wide * here * trained / ranks,
                "gradients": wide * trained * (1 / ranks + (self.node < ranks) / self.node),
            }
        else:
            masters = float(narrow != wide) if ranks == 1 else 1 / ranks
            parts = {
                "weights": narrow * trained + self._frozen_bytes,
                "gradients": wide * trained,
                "master weights and sums" if here else "sums": wide * trained * (here * masters + (ranks > 1) / ranks),
            }
        parts["states"] = here * self.states * wide * trained / ranks
        return {name: held / self.devices for name, held in parts.items()}

    def host_bytes(self, *, pins: bool = False) -> float:
        """Count the bytes in host memory that an offloaded optimizer keeps for a device: masters, states, gradients.

        pins: True for a GPU, whose gradients go to pinned memory, of which torch takes a power of two.
        """
        if not self.offloads:
            return 0.0
        one = wide_bytes(self.dtype_bytes) * self._trained / (self.ranks * self.devices)
        return (1 + self.states) * one + (2.0 ** math.ceil(math.log2(max(1.0, one))) if pins else one)

    def host_update_bytes(self) -> float:
        """Count the bytes that an offloaded optimizer's update moves: over the link to the host, and in host memory.

        A lower bound: send gradients, read and write masters and states once, cast values and send them back.
        """
        wide = wide_bytes(self.dtype_bytes)
        sent, updated = wide + self.dtype_bytes, wide * (2 + 2 * (1 + self.states)) + self.dtype_bytes
        return (sent + updated) * self._trained / (self.ranks * self.devices) if self.offloads else 0.0

    def gathered_bytes(self) -> float:
        """Count the bytes on a device at most of parameters that a layer gathers, or makes of quantized ones."""
        if not self.is_sharded:
            return 0.0 if self.quantization is None else self.dtype_bytes * self.shape.largest_matrix
        words, ties = self.shape.hidden * self.shape.vocab, self._ties
        layer, _ = self.layer_params()
        found = gathered_bytes(
            layer,
            words,
            dtype_bytes=self.dtype_bytes,
            ranks=self.node,
            ties=ties,
            trains=self.trained is None,
            casts=self.node == self.ranks and not self.offloads,
            layer_bytes=self.layer_bytes,
        )
        return found - self._layer().tied_head_gradient * ties  # which a microbatch counts

    def layer_params(self) -> tuple[float, float]:
        """Count the parameters of a decoder layer, and of embedding and head together."""
        words = self.shape.hidden * self.shape.vocab
        rest = self.shape.lookup_params + (words if self._ties else 2 * words)
        return (self._parameters - rest) / self.shape.layers, rest

    @property
    def _ties(self) -> bool:
        return self._layer().family.ties_head if self.ties is None else self.ties

    @property
    def _parameters(self) -> float:
        if self.parameters is not None:
            return self.parameters
        return self.shape.total_params - self.shape.hidden * self.shape.vocab * self._ties

    @property
    def _frozen_bytes(self) -> float:
        if self.frozen_bytes is not None:
            return self.frozen_bytes
        frozen = self.dtype_bytes * (self._parameters - self._trained)
        if self.quantization is None:
            return frozen
        return frozen - (self.dtype_bytes - QUANTIZED_BYTES[self.quantization]) * self.shape.quantized_params

    @property
    def _trained(self) -> float:
        return self._parameters if self.trained is None else self.trained

    def saved_bytes(self, recompute: str) -> float:
        """Count the bytes that a device keeps of one token from forward to backward, the last norm's included.

        All but two layers of them can be offloaded. recompute: as `core.plan.kinds_by_layer` reads it.
        """
        layer = self._layer()
        saved = self.shape.layers * layer.saved(recompute) + layer.bare_norm * self.shape.hidden
        return saved / self.devices

    def peak_bytes(self, tokens: int, choice: Choice = AS_CUT) -> float:
        """Return the peak of the fullest device with microbatches of `tokens` tokens on the rank."""
        return self.state_bytes() + self.gathered_bytes() + float(self.microbatch_bytes(tokens, choice))

    def microbatch_bytes(self, tokens: Numbers, choice: Choice = AS_CUT, *, kept: Numbers | None = None) -> Numbers:
        """Return the peak without states and gathered parameters; arrays have an entry per microbatch.

        kept: number of microbatches whose activations the first stage keeps (default: the most that the schedule
        allows); later stages keep fewer.
        """
        layers, layer, chunks, offload = self.shape.layers, self._layer(), self.cut.chunks, choice.offload
        first = self.cut.microbatches_kept if kept is None else kept
        last = np.minimum(first, self.cut.stages - self.cut.fill)
        norm, head = layer.bare_norm * self.shape.hidden, layer.tied_head_gradient
        saved = layers * layer.saved(choice.recompute) + norm
        own, window = saved / chunks, min(WINDOW_LAYERS, layers / chunks) * saved / layers
        # A stage offloads whole chunks, except of the last chunk, of which two layers stay, as of a whole model.
        away_of_last = 1 - kept_ratio(offload, layers / chunks)
        away = away_of_last if chunks == 1 else np.asarray(offload)
        loss = loss_bytes(
            self.shape, tokens, self.dtype_bytes, logits_at_once=self.logits_at_once, trains_head=self.trained is None
        )
        on_last = (last * saved / self.cut.stages - own) * (1 - away) + own * (1 - away_of_last)
        moments = [on_last * tokens + layer.result * tokens + loss]
        if self.cut.stages > 1:  # a layer runs forward while the first activations of the next backward return
            back = np.minimum(away * own, np.maximum(0.0, window - (1 - away) * own))
            runs = np.where(away > 0, saved / layers, 0.0)
            moments.append((first * saved / self.cut.stages * (1 - away) + back + runs) * tokens)
        for unpacked, beside in layer.turns(choice.recompute):
            left = own - norm / chunks - unpacked  # offloaded activations return to a window beside the unpacked ones
            on_device = unpacked + np.maximum(left - away * own, np.minimum(left, window))
            on_device = on_device + (first * saved / self.cut.stages - own) * (1 - away)
            moments.append(on_device * tokens + beside * tokens + layer.experts_gradient + head)
        return np.maximum.reduce(np.broadcast_arrays(*moments))

    def _layer(self) -> _Layer:
        return _Layer(
            shape=self.shape,
            dtype_bytes=self.dtype_bytes,
            fused_norms=self.fused_norms,
            frozen=self.trained is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The differences of a family's layer from a Llama's.

    norms_after: True with norms after attention and MLP. norms_heads: True with normed queries and keys. mlp_widths:
    saved tensors of the MLP's width. widely: True if norms scale in fp32. ties_head: True if tied by default.
    """

    norms_after: int = 0
    norms_heads: bool = False
    mlp_widths: int = 4  # gate, up, the activated gate, the product
    widely: bool = False
    ties_head: bool = False


_FAMILIES = {
    "qwen3": _Family(norms_heads=True),
    "qwen3_moe": _Family(norms_heads=True),
    "gemma3_text": _Family(norms_after=2, norms_heads=True, widely=True, ties_head=True),
    "gpt_oss": _Family(mlp_widths=7, widely=True),
}
_UNGATED_WIDTHS = 2  # saved by an MLP without a gate: its activation's input and output
_EXPERT_COPIES = 3  # of a token's hidden state for each of its experts: gathered, result, weighted result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Bytes of one layer for a token, on average over the layers.

    frozen: True if the weights of norms do not train, so that their inputs need not be saved.
    """

    shape: ModelShape
    dtype_bytes: int
    fused_norms: bool = False
    frozen: bool = False

    @property
    def family(self) -> _Family:
        return _FAMILIES.get(self.shape.family, _Family())

    @property
    def exact(self) -> int:
        """Bytes of a number inside a norm."""
        return self.dtype_bytes if self.fused_norms else wide_bytes(self.dtype_bytes)

    @property
    def bare_norm(self) -> int:
        """Bytes of a number that a norm saves beside its result: the exact input, and the normed value."""
        if self.fused_norms:
            return self.dtype_bytes
        return self.exact + (self.exact if self.family.widely else self.dtype_bytes)

    @property
    def result(self) -> int:
        """Bytes of a hidden state."""
        return self.dtype_bytes * self.shape.hidden

    @property
    def attention(self) -> int:
        """Bytes of attention's result and log-sum-exp, which `all_but_attention` keeps."""
        shape, sums = self.shape, wide_bytes(self.dtype_bytes) * self.shape.heads * self.shape.num_attention
        return (self.dtype_bytes * shape.query_width + sums) // shape.layers

    @property
    def everything(self) -> int:
        """Bytes that are saved where nothing is recomputed."""
        shape, family, narrow = self.shape, self.family, self.dtype_bytes
        queries, keys = shape.query_width, shape.key_width  # of all layers
        kept = 2 * (self.bare_norm + narrow * (not self.frozen)) * shape.hidden
        kept += family.norms_after * self.bare_norm * shape.hidden
        attending = self.bare_norm * (queries + keys) * family.norms_heads + narrow * (queries + 2 * keys)
        kept += self.attention + (attending + narrow * shape.mixer_kept) // shape.layers
        mlp = (family.mlp_widths if shape.gated else _UNGATED_WIDTHS) * shape.mlp_width
        mlp += _EXPERT_COPIES * shape.hidden * shape.experts_per_token * shape.num_mlp * (shape.experts > 1)
        return kept + narrow * mlp // shape.layers

    @property
    def products(self) -> int:
        """Bytes of what products give, except the last of a layer that no later operation reads again.

        Projections around attention; into the MLP, and out of experts or before a norm; of a layer with states, as wide
        as its parameters are. With adapters on all matrices, theirs too, and the last frozen one's.
        """
        shape, family = self.shape, self.family
        attending = shape.query_width + 2 * shape.key_width + shape.hidden * shape.num_attention
        mlp = (2 if shape.gated else 1) * shape.mlp_width
        experts = shape.hidden * shape.experts_per_token * shape.num_mlp * (shape.experts > 1)
        normed = shape.hidden * shape.layers * (family.norms_after > 0)
        widths = attending + mlp + experts + normed + shape.mixer_params // shape.hidden
        widths += (widths + shape.hidden * shape.layers) * self.frozen
        return self.dtype_bytes * widths // shape.layers

    def saved(self, recompute: str) -> float:
        """Count the bytes that are saved from forward to backward."""
        return sum(share * self._saved(kind) for kind, share in kinds_by_layer(recompute).shares)

    def _saved(self, kind: str) -> int:
        again = RECOMPUTED[kind]
        if again is None:
            return self.everything
        found = self.result + self.attention * (not again.attention) + self.products * (not again.products)
        return min(found, self.everything)

    def turns(self, recompute: str) -> list[tuple[int, int]]:
        """List the highest moments of the first layer of backward: bytes of unpacked activations, bytes beside them.

        In an MLP: three unpacked widths; the gradients of its result and of two widths (of experts, one after the
        other). In a norm, if that comes first: its saved values; five or six exact numbers. A recomputed layer adds all
        that it had not kept; the first layers, whose kind may be stronger, add no more than what is free by then.
        """
        kind = kinds_by_layer(recompute).kind
        shape, family, narrow = self.shape, self.family, self.dtype_bytes
        active = shape.mlp_width // shape.num_mlp
        gradients = narrow * (shape.hidden + 2 * active)
        if shape.experts > 1:
            gradients = narrow * (2 * shape.hidden + 2 * active // shape.experts)
        after = self.bare_norm * shape.hidden * (family.norms_after > 0)
        in_norm = (5 if family.widely or self.frozen else 6) * self.exact * shape.hidden
        if kind == "none":
            return [(3 * narrow * active, gradients - after), (self.bare_norm * shape.hidden, in_norm)]
        kept = self._saved(kind)
        again = self.everything - kept + (narrow * shape.hidden if self.exact != narrow else 0)
        return [(kept, again + max(gradients - after, in_norm * (family.norms_after > 0)))]

    @property
    def tied_head_gradient(self) -> int:
        """Bytes of a tied head's gradient, which waits for the embedding's; the same for any number of tokens."""
        tied = self.family.ties_head and not self.frozen
        return self.dtype_bytes * self.shape.hidden * self.shape.vocab * tied

    @property
    def experts_gradient(self) -> int:
        """Bytes of the gradients of a layer's experts, gate and up twice; the same for any number of tokens."""
        shape, trained = self.shape, self.shape.experts > 1 and not self.frozen
        matrices = 5 if shape.gated else 3
        return self.dtype_bytes * matrices * shape.hidden * shape.intermediate * shape.experts * trained
