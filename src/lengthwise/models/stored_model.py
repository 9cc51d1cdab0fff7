"""A model in a folder or on the hub, which a session reads by itself, so that ranks read their own rows of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lengthwise.comm import Transport, agree
from lengthwise.config import LoraConfig
from lengthwise.core.errors import Collector, ConfigError
from lengthwise.core.host_memory import free_host_bytes
from lengthwise.models.families import check_model_config
from lengthwise.models.lora import build_adapted, check_lora
from lengthwise.models.model_source import DTYPES, ModelSource, check_weights, count_parameters, find_model
from lengthwise.models.own_rows import OwnRows, forget_towers, own_rows
from lengthwise.models.quantized import frozen_bytes, loading_config
from lengthwise.models.text_part import has_towers


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model that a session reads by itself.

    Attributes:
        source: config, and the place of the weights.
        lora: adapters to train, or None to train all parameters.
        dtype: dtype of the parameters in steps; exact weights are kept in fp32 or wider.
        seed: seed of adapters, and of parameters without stored weights.
        whole_logits: True if the loss makes all logits of a microbatch at once.
        draws_both: True to draw both matrices of adapters, for checks.
        sees: True to have the towers on every rank, for rows with images.
    """

    source: ModelSource
    lora: LoraConfig | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    whole_logits: bool = False
    draws_both: bool = False
    sees: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        *,
        dtype: str = "bf16",
        lora: LoraConfig | None = None,
        quantization: str | None = None,
        seed: int = 0,
    ) -> StoredModel:
        """Return the model of a folder or a hub name. dtype: fp32, bf16 or fp64. quantization: nf4, fp4 or int8.

        Raises:
            LengthwiseError: there is no such model, or it cannot be trained; one error has all problems.
        """
        model = cls(source=find_model(name, quantization=quantization), lora=lora, dtype=DTYPES[dtype], seed=seed)
        model.check()
        return model

    def check(self) -> None:
        """Check config, weights and adapters without reading tensors.

        Raises:
            LengthwiseError: one error has all problems.
        """
        problems = Collector()
        problems.attempt(lambda: check_model_config(self.source.config))
        problems.raise_all()
        problems.attempt(lambda: check_weights(self.source))
        problems.attempt(lambda: check_lora(self.source, self.lora))
        problems.attempt(self._check_quantization)
        problems.raise_all()

    def _check_quantization(self) -> None:
        if loading_config(self.source.quantization) is not None and has_towers(self.source.config):
            expected, got = "a model of text alone", f"{self.source.name}, which has towers"
            remedy = "Load it quantized in your own script, and give it to a Session or a Trainer."
            raise ConfigError("quantization", expected=expected, got=got, remedy=remedy)

    def check_room(self) -> None:
        """Check that one process can read the whole model: in fp32, the dtype of loading, unless it is quantized.

        Raises:
            ConfigError: less host memory is free.
        """
        parameters, free = count_parameters(self.source.config), free_host_bytes()
        kind, needed = self.source.quantization or "fp32", 4 * parameters
        if self.source.quantization is not None:
            needed = frozen_bytes(self.build(stored=False), 4) or 0
        if 0 < free < needed:
            expected = f"a model whose parameters fit into the {free / 1e9:.1f} GB that are free here"
            got = f"{parameters:,} parameters, {needed / 1e9:.1f} GB in {kind}"
            where, remedy = f"model {self.source.name}", "Give a smaller model."
            raise ConfigError(where, expected=expected, got=got, remedy=remedy)

    def build(self, *, stored: bool) -> Any:
        """Build the model, or its text part; unless `stored`, its parameters are on the meta device."""
        return build_adapted(self.source, self.lora, seed=self.seed, draws_both=self.draws_both, stored=stored)

    def read(self, model: Any, transport: Transport, *, is_cut: bool, stages: int) -> tuple[Any, OwnRows | None]:
        """Return the model with the weights for this rank to send, and the source of its own rows. Collective.

        A rank that sends nothing returns `model`, whose parameters are empty. With whole parameters rank 0 alone reads
        weights; with stages the ranks of the first replica do. If parameters are sharded (`is_cut`) and the files have
        them one by one, every rank reads its own rows later, from the returned source. Rank 0 alone holds, and saves,
        towers beside the text part.
        """
        rank, rows = transport.rank, self._own_rows(model, transport) if is_cut else None
        if rows is None and rank < stages:
            model = self.build(stored=True)
        if stages > 1 and rank:
            forget_towers(model)
        elif rows is not None and not rank:
            rows.read_towers(model)
        return model, rows

    def _own_rows(self, model: Any, transport: Transport) -> OwnRows | None:
        """Return the source of every rank's rows, on all ranks None if rank 0 must read all. Collective."""
        rows = own_rows(self.source, model) if self.lora is None else None
        can = torch.tensor([float(rows is None)])
        transport.all_reduce(can)
        if can.item() or rows is None:
            return None
        agree(transport, rows.digest(), "weights of the model")
        return rows
