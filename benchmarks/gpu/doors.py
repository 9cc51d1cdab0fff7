"""A loop of one's own around a `Session`, or TRL's trainer, of one rank of many: what `many` starts under torchrun.

    torchrun --nproc-per-node RANKS benchmarks/gpu/doors.py (session|trainer) (cuda|cpu) FOLDER

The folder has a model's config and rows, as `many` writes them. Rank 0 writes the loss of each step to losses.jsonl.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lengthwise import Session

STEPS = 5


def session(kind: str, folder: Path) -> list[float]:
    """Train on the rows; ranks share a GPU where there are too few."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", local % gpus)
    if kind == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).to(device)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    longest = max(len(row["input_ids"]) for row in rows)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), list[float]()
    how: dict[str, Any] = {"precision": "bf16"} if kind == "cuda" else {}
    with Session(model, optimizer, capacity_tokens=2 * longest // 3 + 1, shard="zero3", **how) as planned:
        for _ in range(STEPS):
            losses.append(planned.backward(rows).loss)
            planned.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trainer(kind: str, folder: Path) -> list[float]:
    """Train on the conversations of the examples."""
    from tiny import chats, model, tokenizer  # pyright: ignore[reportMissingImports] - of the examples
    from trl import SFTConfig

    from lengthwise.integrations.trl import SFTTrainer

    arguments = SFTConfig(
        str(folder / "trainer"), per_device_train_batch_size=8 // int(os.environ["WORLD_SIZE"]), max_steps=STEPS,
        learning_rate=1e-3, logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no",
        use_cpu=kind == "cpu", bf16=kind == "cuda", max_length=None, assistant_only_loss=True,
    )  # fmt: skip
    planned = SFTTrainer(model=model(), args=arguments, train_dataset=chats(), processing_class=tokenizer())
    planned.train()
    return [row["loss"] for row in planned.state.log_history if "loss" in row]


def main() -> None:
    """Run the door that the command line asks for."""
    door, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    losses = {"session": session, "trainer": trainer}[door](kind, folder)
    if os.environ["RANK"] == "0":
        lines = "".join(f"{json.dumps({'loss': loss})}\n" for loss in losses)
        (folder / "losses.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
