"""axolotl's trainer with planned steps."""

from __future__ import annotations

import signal
from typing import Any

import torch
import transformers
from axolotl.core.trainers import AxolotlTrainer  # pyright: ignore[reportMissingImports] - as in axolotl.py
from axolotl.integrations.base import PluginManager  # pyright: ignore[reportMissingImports]

from lengthwise.data import NO_LOSS
from lengthwise.integrations.accelerators import replaced
from lengthwise.integrations.axolotl_settings import SECTION
from lengthwise.integrations.transformers import PlannedTrainerMixin
from lengthwise.session import Session


class SFTTrainer(PlannedTrainerMixin, AxolotlTrainer):
    """axolotl's trainer of causal models with planned steps, and the section `lengthwise` of the file that it has read.

    A pack of `sample_packing` is planned by its documents.
    """

    # axolotl's counts tokens and serves ORPO; with Trainer's own the session may compute the loss in chunks.
    compute_loss = transformers.Trainer.compute_loss
    _trainable = _total = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        section = PluginManager.get_instance().cfg.get(SECTION) or {}
        super().__init__(*args, **section, **kwargs)

    def _start_session(self, optimizer: Any) -> Session:
        self.model.gradient_checkpointing_disable()  # axolotl's loader has enabled it; the arguments ask the session
        session = super()._start_session(optimizer)
        if session.engine.is_cut:  # axolotl's handler of Ctrl-C would save the part of one rank as the model
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return session

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        with replaced(self, eval_data_collator=self._collator(self.eval_data_collator)):
            return super()._get_dataloader(*args, **kwargs)

    def _create_multipack_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Return a sampler whose packs have the tokens of all ranks' packs."""
        with replaced(self, _train_batch_size=self._train_batch_size * self.args.world_size):
            return super()._create_multipack_sampler(*args, **kwargs)

    def _update(self, normalizer: float) -> Any:
        rows = [row for batch in self._batches for row in batch.rows]
        self._trainable += sum(int((row.get("labels", row["input_ids"]) != NO_LOSS).sum()) for row in rows)
        self._total += sum(len(row["input_ids"]) for row in rows)
        return super()._update(normalizer)

    def _sync_token_counts(self) -> None:
        counts = {"trainable": self._trainable, "total": self._total}  # of all ranks
        self.state.tokens = {name: torch.tensor(count) for name, count in counts.items()}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        kept = [group["weight_decay"] for group in self.optimizer.param_groups]  # that of the file, as in axolotl
        super()._load_optimizer_and_scheduler(checkpoint)
        for group, value in zip(self.optimizer.param_groups, kept, strict=True):
            group["weight_decay"] = value
