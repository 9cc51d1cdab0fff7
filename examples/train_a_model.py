"""Train a small model on sequences of very different lengths, on two CPU processes. Needs torch: half a minute."""

import json
import tempfile
from pathlib import Path

import lengthwise

if __name__ == "__main__":  # ranks are processes of their own
    folder = Path(tempfile.mkdtemp())
    rows = [{"text": "to be " * words} for words in [100, 25, *[7] * 20]]  # one byte is one token of model tiny
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")

    settings = {
        "model": "tiny",  # or a local Hugging Face folder, or a name on the hub
        "data": [{"path": str(folder / "train.jsonl")}],
        "steps": 3,
        "global_batch": {"sequences": 22},
        "capacity_tokens": 512,  # the sequence of 600 tokens is cut over both ranks, the others are packed beside it
        "device": "cpu",
        "output": str(folder / "run"),
    }
    result = lengthwise.train(settings, ranks=2)
    print(f"{result.steps} steps, loss {result.first_loss:.3f} -> {result.last_loss:.3f}")
    print(f"the model, a Hugging Face one: {result.folder / 'model'}")
