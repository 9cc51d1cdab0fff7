"""Bytes of a step on one device, by formulas from a model's shape: where nothing runs and nothing can be measured.

States as `engine.parameters` and AdamW keep them. Of a layer what its operations save for
backward, tensor by tensor, by family (`_FAMILIES`; others are counted as a Llama). Beside that, the most of three
moments: the loss; the first norm of backward; the first MLP of backward, all of its layer computed again where it was
not kept. Held to what steps take by tests/engine/test_engine_peaks.py. `cost.capacity` says how many tokens fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lengthwise.core.held import kept_ratio
from lengthwise.core.shape import ModelShape
from lengthwise.cost.choices import AS_CUT, Choice
from lengthwise.cost.layout import ModelLayout
from lengthwise.cost.links import Numbers
from lengthwise.cost.microbatch import WINDOW_LAYERS

_LOGITS_AT_ONCE = 1 << 25  # that a chunked loss makes, tokens x words: 128 MB in fp32; GEMMs of 256 rows at 128K words
CHUNK_TOKENS_ON_GPUS = 2048  # at least: fewer are launches and reads of the head, no arithmetic (estimated)
_LOGIT_COPIES = 3
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}  # of a number of the model


def wide_bytes(dtype_bytes: int) -> int:
    """Return the bytes of what is summed or kept exactly beside numbers of so many bytes: fp32 at least."""
    return max(4, dtype_bytes)


def state_bytes(
    parameters: float,
    *,
    dtype_bytes: int,
    ranks: int,
    trained: float | None = None,
    states: int = 2,
    offloads: bool = False,
) -> float:
    """Count parameters, gradients, and a rank's slices of master weights, reduced gradient and the optimizer's states.

    trained: how many of the parameters; None: all. states: of each, as AdamW's two moments. A rank alone has its slices
    in the buffers themselves. offloads: master weights and states are not on the device.
    """
    wide, trained = wide_bytes(dtype_bytes), parameters if trained is None else trained
    slices = ((dtype_bytes != wide) if ranks == 1 else 2 / ranks) + states / ranks
    if offloads:
        slices = 0.0 if ranks == 1 else 1 / ranks
    return parameters * dtype_bytes + trained * wide * (1 + slices)


def gathered_bytes(
    layer: float, words: float, *, dtype_bytes: int, ranks: int, ties: bool, trains: bool = True, casts: bool = True
) -> float:
    """Count what `engine.unit_waves` holds at most beside rows and activations.

    layer, words: parameters of a decoder layer, and of the embedding; the head has as many, or is the embedding, where
    a model `ties` them. As backward computes a layer there are its values and gradients, the next layer's values, which
    arrive from a rank's row in the same numbers, and the sum of the layer or the head before in wide ones, whole and as
    a row. What is tied stays with its gradients; where both of these meet there are three. ranks: that gather together.
    casts: whether rows are wide, and cast before they are gathered; those of hybrid are not.
    """
    narrow, wide = dtype_bytes, wide_bytes(dtype_bytes)
    if not trains:
        return narrow * (2 * layer + words if ties else max(2 * layer, layer + words))
    summed, beside = wide * (1 + 1 / ranks), narrow * (3 + casts / ranks) * layer
    if ties:
        return max(beside + summed * layer + narrow * 2 * words, narrow * (4 * words + 2 * layer) + summed * layer)
    return max(beside + summed * max(layer, words), narrow * layer + (narrow + wide) * words)


def logits_at_once(words: int, *, on_gpus: bool) -> int:
    """Return how many logits a chunked loss makes at once, by run files, sessions and trainers alike."""
    return max(_LOGITS_AT_ONCE, CHUNK_TOKENS_ON_GPUS * words) if on_gpus else _LOGITS_AT_ONCE


def loss_bytes(
    shape: ModelShape, tokens: Numbers, dtype_bytes: int, *, logits_at_once: int | None, trains_head: bool = True
) -> Numbers:
    """Count the bytes that the loss of a microbatch of `tokens` holds at its peak.

    Three times its logits in wide bytes: their log-softmax and two gradients. A chunked loss holds `logits_at_once` of
    them (None: all), the gradients of the hidden states, those of the model's numbers, and of the head; when a chunk
    adds to these, they are there twice and the logits once.
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
    """What a step of a model on one of `ranks` is, beside its tokens; `cost.capacity.memory_of` makes it.

    logits_at_once: that the loss makes; None: all.
    fused_norms: norms keep input and result in the model's numbers, as fused kernels do (Megatron's); else as Hugging
    Face's operations, which keep the input in fp32 and what is normed, too.
    """

    shape: ModelShape
    dtype_bytes: int = 4
    logits_at_once: int | None = _LOGITS_AT_ONCE
    fused_norms: bool = False

    def state_bytes(self) -> float:
        """Count what a device keeps from step to step, gradients included."""
        if self.is_sharded:
            return self._rows_bytes() / self.devices
        held = state_bytes(
            self._parameters,
            dtype_bytes=self.dtype_bytes,
            ranks=self.ranks,
            trained=self.trained,
            states=self.states,
            offloads=self.offloads,
        )
        return held / self.devices

    def _rows_bytes(self) -> float:
        """Count a rank's rows of what `engine.parameters` and the optimizer keep: master weights, gradients and states.

        Of what does not train, the parameters alone, in the model's numbers. Under hybrid a node's ranks have rows of
        values and sums beside that. Where master weights and states are on the host, the device has values.
        """
        narrow, wide, is_one = self.dtype_bytes, wide_bytes(self.dtype_bytes), self.node == self.ranks
        of_node = (narrow * (self.offloads or not is_one) + wide * (not is_one)) * self._trained / self.node
        frozen = narrow * (self._parameters - self._trained) / self.node
        return (1 if self.offloads else 2 + self.states) * wide * self._trained / self.ranks + of_node + frozen

    def host_bytes(self) -> float:
        """Count what an offloaded optimizer keeps of a device's in the host's memory: masters, states and gradients."""
        held = (2 + self.states) * wide_bytes(self.dtype_bytes) * self._trained / (self.ranks * self.devices)
        return held if self.offloads else 0.0

    def host_update_bytes(self) -> float:
        """Count what the update of an offloaded optimizer moves between host and device, and in the host's memory.

        At least: gradients go there, masters and states are read and written once, values cast and sent back.
        """
        wide = wide_bytes(self.dtype_bytes)
        sent, updated = wide + self.dtype_bytes, wide * (2 + 2 * (1 + self.states)) + self.dtype_bytes
        return (sent + updated) * self._trained / (self.ranks * self.devices) if self.offloads else 0.0

    def state_parts(self) -> dict[str, float]:
        """Return what a device keeps from step to step by its parts, in bytes; `state_bytes` is their sum."""
        bare, sums = replace(self, states=0), self._trained * wide_bytes(self.dtype_bytes) / self.devices
        states = self.state_bytes() - bare.state_bytes()
        if self.is_sharded:
            sums *= 1 / self.ranks + (self.node < self.ranks) / self.node
            return {"weights": bare.state_bytes() - sums, "gradients": sums, "states": states}
        weights = self._parameters * self.dtype_bytes / self.devices
        slices = bare.state_bytes() - weights - sums
        name = "sums" if self.offloads else "master weights and sums"
        return {"weights": weights, "gradients": sums, name: slices, "states": states}

    def gathered_bytes(self) -> float:
        """Count what a device gathers of parameters for a pass, at most, where they lie over the ranks."""
        if not self.is_sharded:
            return 0.0
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
        )
        return (found - self._layer().tied_head_gradient * ties) / self.tensor  # which a microbatch counts

    def layer_params(self) -> tuple[float, float]:
        """Count the parameters of a decoder layer, and of what is in none: embedding and head."""
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
    def _trained(self) -> float:
        return self._parameters if self.trained is None else self.trained

    def saved_bytes(self, recompute: str) -> float:
        """Count what a device keeps of one token from forward to backward: what can be offloaded, but for two layers.

        recompute: one of `RECOMPUTE_KINDS`. The norm after the last layer is counted, too.
        """
        layer = self._layer()
        saved = self.shape.layers * layer.saved(recompute) + layer.bare_norm * self.shape.hidden
        return saved / self.devices

    def peak_bytes(self, tokens: int, choice: Choice = AS_CUT) -> float:
        """Return the peak of the fullest device with microbatches of so many tokens on the rank."""
        return self.state_bytes() + self.gathered_bytes() + float(self.microbatch_bytes(tokens, choice))

    def microbatch_bytes(self, tokens: Numbers, choice: Choice = AS_CUT, *, kept: Numbers | None = None) -> Numbers:
        """Return what of the peak is not kept from step to step; arrays have an entry a microbatch.

        kept: of how many microbatches the first stage keeps activations, the last one fewer; None: as many as it may.
        """
        layers, layer, chunks, offload = self.shape.layers, self._layer(), self.cut.chunks, choice.offload
        first = self.cut.microbatches_kept if kept is None else kept
        last = np.minimum(first, self.cut.stages - self.cut.fill)
        norm, head = layer.bare_norm * self.shape.hidden, layer.tied_head_gradient
        saved = layers * layer.saved(choice.recompute) + norm
        own, window = saved / chunks, min(WINDOW_LAYERS, layers / chunks) * saved / layers
        # In stages all of a chunk goes but of the last, of which two layers stay, as of a whole model.
        away_of_last = 1 - kept_ratio(offload, layers / chunks)
        away = away_of_last if chunks == 1 else np.asarray(offload)
        loss = loss_bytes(
            self.shape, tokens, self.dtype_bytes, logits_at_once=self.logits_at_once, trains_head=self.trained is None
        )
        on_last = (last * saved / self.cut.stages - own) * (1 - away) + own * (1 - away_of_last)
        moments = [on_last * tokens + layer.result * tokens + loss]
        if self.cut.stages > 1:  # a layer that runs forward, while what the next backward needs first comes back
            back = np.minimum(away * own, np.maximum(0.0, window - (1 - away) * own))
            runs = np.where(away > 0, saved / layers, 0.0)
            moments.append((first * saved / self.cut.stages * (1 - away) + back + runs) * tokens)
        for unpacked, beside in layer.turns(choice.recompute):
            left = own - norm / chunks - unpacked  # what is away comes back into a window beyond what is unpacked
            on_device = unpacked + np.maximum(left - away * own, np.minimum(left, window))
            on_device = on_device + (first * saved / self.cut.stages - own) * (1 - away)
            moments.append(on_device * tokens + beside * tokens + layer.experts_gradient + head)
        return np.maximum.reduce(np.broadcast_arrays(*moments)) / self.tensor

    def _layer(self) -> _Layer:
        return _Layer(
            shape=self.shape,
            dtype_bytes=self.dtype_bytes,
            fused_norms=self.fused_norms,
            frozen=self.trained is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family's layer has: norms after its parts, norms of heads, and widths that its MLP keeps.

    widely: its norms scale in fp32. ties_head: its configs give head and embedding the same weights.
    """

    norms_after: int = 0
    norms_heads: bool = False
    mlp_widths: int = 4  # gate, up, what the gate becomes and their product
    widely: bool = False
    ties_head: bool = False


_FAMILIES = {
    "qwen3": _Family(norms_heads=True),
    "qwen3_moe": _Family(norms_heads=True),
    "gemma3_text": _Family(norms_after=2, norms_heads=True, widely=True, ties_head=True),
    "gpt_oss": _Family(mlp_widths=7, widely=True),
}
_UNGATED_WIDTHS = 2  # what an MLP without a gate keeps: what enters its activation, and what leaves it
_EXPERT_COPIES = 3  # of a token for each of its experts: gathered, the result, and that weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """What one layer holds of a token, in bytes; where layers differ, on average.

    frozen: weights of norms are not trained, and so need not what they multiply.
    """

    shape: ModelShape
    dtype_bytes: int
    fused_norms: bool = False
    frozen: bool = False

    @property
    def family(self) -> _Family:
        """How its operations differ from a Llama's."""
        return _FAMILIES.get(self.shape.family, _Family())

    @property
    def exact(self) -> int:
        """Bytes of a number inside a norm."""
        return self.dtype_bytes if self.fused_norms else wide_bytes(self.dtype_bytes)

    @property
    def bare_norm(self) -> int:
        """What a norm keeps of each number but its result: the input, exactly, and what it was normed to."""
        if self.fused_norms:
            return self.dtype_bytes
        return self.exact + (self.exact if self.family.widely else self.dtype_bytes)

    @property
    def result(self) -> int:
        """Hidden states in the model's numbers."""
        return self.dtype_bytes * self.shape.hidden

    @property
    def attention(self) -> int:
        """The result of attention and its log-sum-exp, which layers keep where all but attention is recomputed."""
        shape, sums = self.shape, wide_bytes(self.dtype_bytes) * self.shape.heads * self.shape.num_attention
        return (self.dtype_bytes * shape.query_width + sums) // shape.layers

    @property
    def everything(self) -> int:
        """What is kept where nothing is recomputed."""
        shape, family, narrow = self.shape, self.family, self.dtype_bytes
        queries, keys = shape.query_width, shape.key_width  # of all layers
        kept = 2 * (self.bare_norm + narrow * (not self.frozen)) * shape.hidden
        kept += family.norms_after * self.bare_norm * shape.hidden
        attending = self.bare_norm * (queries + keys) * family.norms_heads + narrow * (queries + 2 * keys)
        kept += self.attention + (attending + narrow * shape.mixer_kept) // shape.layers
        mlp = (family.mlp_widths if shape.gated else _UNGATED_WIDTHS) * shape.mlp_width
        mlp += _EXPERT_COPIES * shape.hidden * shape.experts_per_token * shape.num_mlp * (shape.experts > 1)
        return kept + narrow * mlp // shape.layers

    def saved(self, recompute: str) -> int:
        """Count what is kept from forward to backward."""
        enters = self.result
        return {"none": self.everything, "all_but_attention": enters + self.attention, "layer": enters}[recompute]

    def turns(self, recompute: str) -> list[tuple[int, int]]:
        """List the highest moments of the first layer of backward: what it has unpacked, what there is beside.

        In an MLP the gradients of its result and of two widths (of experts one after the other), and three of its
        widths unpacked. In a norm, if that comes first, what it kept, and five or six numbers inside it. Where the
        layer is computed again it is there beside, less what was kept of it.
        """
        shape, family, narrow = self.shape, self.family, self.dtype_bytes
        active = shape.mlp_width // shape.num_mlp
        gradients = narrow * (shape.hidden + 2 * active)
        if shape.experts > 1:
            gradients = narrow * (2 * shape.hidden + 2 * active // shape.experts)
        after = self.bare_norm * shape.hidden * (family.norms_after > 0)
        in_norm = (5 if family.widely or self.frozen else 6) * self.exact * shape.hidden
        if recompute == "none":
            return [(3 * narrow * active, gradients - after), (self.bare_norm * shape.hidden, in_norm)]
        kept = self.saved(recompute)
        again = self.everything - kept + (narrow * shape.hidden if self.exact != narrow else 0)
        return [(kept, again + max(gradients - after, in_norm * (family.norms_after > 0)))]

    @property
    def tied_head_gradient(self) -> int:
        """Bytes of a head's gradient that waits for that of the embedding whose weights it shares; of no token."""
        tied = self.family.ties_head and not self.frozen
        return self.dtype_bytes * self.shape.hidden * self.shape.vocab * tied

    @property
    def experts_gradient(self) -> int:
        """Bytes of the gradients of all experts of a layer, those of gate and up twice as one is added; of no token."""
        shape, trained = self.shape, self.shape.experts > 1 and not self.frozen
        matrices = 5 if shape.gated else 3
        return self.dtype_bytes * matrices * shape.hidden * shape.intermediate * shape.experts * trained
