"""Write what `sft.yaml` trains: a model, a tokenizer and chats that any machine has."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from tiny import chats, model, tokenizer

folder = Path("runs/axolotl")
model().save_pretrained(folder / "model")
tokenizer().save_pretrained(folder / "model")
chats().to_json(folder / "chats.jsonl")
print(f"wrote {folder}")
