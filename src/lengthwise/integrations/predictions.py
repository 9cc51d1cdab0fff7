"""What a Trainer's `compute_metrics` gets: logits and labels of all rows of an evaluation, run by the plan.

The rows of a batch run together, and their logits come to every rank; then they go to the host, row by row through
`preprocess_logits_for_metrics`. In fp32, logits have tokens x vocabulary x 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_pt_utils import nested_concat, nested_numpify
from transformers.trainer_utils import EvalPrediction, denumpify_detensorize

from lengthwise.data import NO_LOSS
from lengthwise.session import Session
from lengthwise.session.losses import Tokens


class Predictions:
    """Collects the rows of an evaluation as arrays, padded on the right with -100 as plain Trainer pads batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._found: dict[str, list[Any]] = {"predictions": [], "label_ids": [], "inputs": [], "losses": []}

    def add(self, session: Session, rows: Sequence[Any], loss: float) -> None:
        """Run a batch's rows, with the mean loss `loss`, and keep the arguments of `compute_metrics`. Collective."""
        parts: dict[str, list[Any]] = {name: [] for name in self._found}
        logits = session.token_values(list(rows), _logits)
        preprocess = self._trainer.preprocess_logits_for_metrics
        for row, of_row in zip(rows, logits, strict=True):
            ids = torch.as_tensor(row["input_ids"], device=of_row.device)[None]
            labels = torch.as_tensor(row["labels"], device=of_row.device)[None] if "labels" in row else ids
            made = of_row[None] if preprocess is None else preprocess(of_row[None], labels)
            kept = {"predictions": made, "label_ids": labels, "inputs": ids, "losses": torch.tensor([loss])}
            for name, values in kept.items():
                parts[name].append(nested_numpify(values))
        for name, values in parts.items():
            self._found[name].append(_joined(values))

    def metrics(self, prefix: str) -> dict[str, Any]:
        """Return the metrics of `compute_metrics`, with `prefix` and _ before their names."""
        join = _joined if self._trainer.args.eval_do_concat_batches else list
        asked = self._trainer.args.include_for_metrics
        names = ["predictions", "label_ids", *["inputs"] * ("inputs" in asked), *["losses"] * ("loss" in asked)]
        given: dict[str, Any] = {name: join(self._found[name]) for name in names}
        made = self._trainer.compute_metrics(EvalPrediction(**given))
        found: Any = denumpify_detensorize(made)
        return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": each for name, each in found.items()}


def _logits(output: Any, _tokens: Tokens) -> Tensor:
    return output.logits[0]


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2  # halves, so that a row is copied few times
    return nested_concat(_joined(parts[:middle]), _joined(parts[middle:]), padding_index=NO_LOSS)
