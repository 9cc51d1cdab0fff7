"""axolotl's plugin: `plugins: [lengthwise.integrations.axolotl.LengthwisePlugin]` makes an axolotl file train planned.

axolotl imports this module before it imports its own trainers, whose arguments other plugins may still extend; so the
planned trainer is imported when axolotl asks for it.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports] - not in the development tools
from axolotl.utils.logging import get_logger  # pyright: ignore[reportMissingImports]

from lengthwise.core.errors import ConfigError, short_traceback
from lengthwise.integrations.axolotl_settings import LengthwiseArgs

_LOG = get_logger("axolotl.lengthwise")  # axolotl shows its own names only
_FUSED = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class LengthwisePlugin(BasePlugin):
    """Planned steps for axolotl's SFT; the section `lengthwise` of the file has the arguments of a planned trainer."""

    _trainer: Any = None

    def register(self, cfg: Any) -> None:
        """Keep axolotl from choosing kernels for LoRA, in the raw values of a file."""
        for name in _FUSED:
            if cfg.get(name) is None:
                cfg[name] = False

    def get_input_args(self) -> str:
        """Return the name of the record that checks the file."""
        return f"{LengthwiseArgs.__module__}.{LengthwiseArgs.__name__}"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Keep the model in host memory until the session places it; after this axolotl reads data and model."""
        cfg["device_map"], cfg["experimental_skip_move_to_device"] = None, True

    def get_trainer_cls(self, cfg: Any) -> Any:
        """Return the planned trainer."""
        from lengthwise.integrations.axolotl_trainer import SFTTrainer

        return SFTTrainer

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """Return what a planned trainer needs: a token counts the same on every rank, and padding has its mask."""
        return {"average_tokens_across_devices": True, "sample_packing_drop_attention_mask": False}

    @short_traceback
    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Say that the run is planned; refuse a trainer that another plugin has given."""
        if not hasattr(trainer, "_trained"):
            got, remedy = type(trainer).__name__, "Remove the plugin that returns this trainer."
            raise ConfigError("plugins", expected="a planned trainer", got=got, remedy=remedy)
        self._trainer = trainer
        ranks = trainer.args.world_size
        _LOG.info(f"lengthwise: every step of this run is planned, on {ranks} {'rank' if ranks == 1 else 'ranks'}")

    def post_train(self, cfg: Any, model: Any) -> None:
        """Save a model whose parameters lie over the ranks: axolotl would save the part of rank 0. Collective."""
        trainer, self._trainer = self._trainer, None  # called twice: before and after axolotl saves
        if trainer is None or not trainer.session.engine.is_cut:
            return
        trainer.save_model(cfg.output_dir)
        for each in {id(each): each for each in (model, trainer.model)}.values():
            each.save_pretrained = MethodType(_saved, each)


def _saved(_model: Any, *_args: Any, **_kwargs: Any) -> None:
    _LOG.info("lengthwise: the model is saved already, from all ranks")
