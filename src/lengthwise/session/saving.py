"""Saving and loading of a `Session`: its state, as a folder of slices, and the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from lengthwise.comm import Transport, on_first_rank
from lengthwise.core.errors import ConfigError, OutputError, short_traceback
from lengthwise.engine.optimizer import SlicedOptimizer
from lengthwise.models import save_model
from lengthwise.session.agreement import Agreement
from lengthwise.session.engine import Engine
from lengthwise.session.misuse import check_kinds
from lengthwise.session.runner import StepRunner
from lengthwise.session.state_folder import Claims, load, save


class SavedSession:
    """The methods of a `Session` that save and load."""

    model: nn.Module
    engine: Engine
    runner: StepRunner
    rank: int
    _transport: Transport
    _updates: SlicedOptimizer | None  # None where nothing trains
    _agreement: Agreement | None
    _is_closed: bool
    _claims: Claims

    @property
    def steps(self) -> int:
        """The steps made so far."""
        return self.runner.steps

    @short_traceback
    def save(self, folder: str | Path, *, background: bool = False) -> None:
        """Write the state into a folder, for `load` on any number of ranks. Collective.

        The folder is whole or absent. Each rank writes its slice into it, on a disk that all ranks share. An earlier
        checkpoint there is replaced once the new one is whole.

        background: True to write while the next steps run. The checkpoint is then whole after one of them, or when the
        session saves again or closes, and a failure is a warning.

        Raises:
            OutputError: a rank cannot write, or another job's open session has saved there.
        """
        check_kinds(folder=folder, background=background)
        trained, path = self._trained("save"), Path(folder).absolute()
        self._agree(f"save after step {self.steps}", folder=str(path), background=background)
        save(self.runner.writer, trained, path, self.steps, claims=self._claims, background=background)

    @short_traceback
    def load(self, folder: str | Path) -> None:
        """Continue from a folder that `save` or `lengthwise train` wrote, or from a plain loop's file. Collective.

        Any number of ranks under any layout may have written a folder; a rank reads its part. Steps, the optimizer's
        states and groups (learning rates), and exact weights are restored. A file that torch.save wrote of a plain
        optimizer's `state_dict` has no steps and no weights: these stay.

        Raises:
            OutputError, Problems: folder or file is damaged, or of another model or optimizer; nothing was changed.
        """
        check_kinds(folder=folder)
        trained, path = self._trained("load"), Path(folder).absolute()
        self._agree(f"load after step {self.steps}", folder=str(path))
        self.runner.writer.finish()
        steps = load(self._transport, trained, path)
        self.runner.steps = self.steps if steps is None else steps

    @short_traceback
    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model, or peft's adapters, as Hugging Face's `save_pretrained` does; rank 0 writes. Collective.

        Raises:
            OutputError: rank 0 cannot write.
        """
        with self.whole_on_first():
            on_first_rank(self._transport, lambda: write_model(self.model, Path(folder)))

    def whole_on_first(self) -> AbstractContextManager[None]:
        """Make sharded parameters whole on rank 0's host inside the block, so that its model can be saved. Collective.

        If only peft's adapters are saved, the base model's parameters are left out.
        """
        parameters = self.engine.parameters
        if parameters is None:
            return nullcontext()
        if self.engine.is_cut:
            self._agree(f"saving after step {self.steps}")
        return parameters.whole_on_first(trained_only=saves_adapters_alone(self.model))

    def whole(self, *, on_first: bool = False) -> AbstractContextManager[None]:
        """Make the model whole on every rank's device inside the block, to generate with it, for example. Collective.

        If parameters are sharded, every rank gathers all of them, and changes made inside the block are lost.

        Args:
            on_first: True to keep them on rank 0's device alone, to send them; sharded parameters of other ranks then
                have shapes without values (the meta device).

        Raises:
            ConfigError: a rank has some of the layers (`stages`).
        """
        parameters = self.engine.parameters
        if self.engine.pipeline is not None:
            remedy = "Leave stages out, or use whole_on_first."
            expected, got = "a model that every rank can run alone", "one whose layers are on several ranks"
            raise ConfigError("stages", expected=expected, got=got, remedy=remedy)
        if parameters is None or not self.engine.is_cut:
            return nullcontext()
        self._agree(f"the whole model after step {self.steps}")
        return parameters.whole(on_first=on_first)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise ConfigError("session", expected="open", got="closed", remedy="Make another Session.")

    def _trained(self, what: str) -> SlicedOptimizer:
        self._refuse_closed()
        if self._updates is None:
            remedy = "Give Session an optimizer."
            raise ConfigError("optimizer", expected=f"an optimizer for {what}", got="none", remedy=remedy)
        return self._updates

    def _agree(self, name: str, **numbers: Any) -> bool:
        """Compare the ranks before they run `name` in a user's loop, see `Agreement.reach`. Collective."""
        return self._agreement is None or self._agreement.reach(name, **numbers)


def saves_adapters_alone(model: nn.Module) -> bool:
    """Return whether saving a model needs trained parameters only: peft's adapters, all trained, none on embeddings."""
    given: Any = model
    if not hasattr(given, "peft_config"):
        return False
    words = (given.get_input_embeddings(), given.get_output_embeddings())
    prefix = getattr(given.base_model, "prefix", "lora_")
    trains = all(each.requires_grad for name, each in given.named_parameters() if prefix in name)
    return trains and not any(hasattr(each, "base_layer") for each in words)


def write_model(model: nn.Module, folder: Path) -> None:
    """Write a model, or peft's adapters, as `save_pretrained` does."""
    given: Any = model
    if folder.is_file():
        remedy = "Give another path."
        raise OutputError(str(folder), expected="a folder", got="a file", remedy=remedy)
    try:
        if hasattr(given, "peft_config"):
            given.save_pretrained(folder)
        else:
            save_model(given, folder)
    except (OSError, SafetensorError) as error:
        remedy = "Free or repair the disk."
        raise OutputError(str(folder), expected="a folder that can be written", got=f"{error}", remedy=remedy) from None
