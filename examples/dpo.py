"""`dpo_plain.py`, planned: `torchrun --nproc-per-node 8 dpo.py`."""

import os

from tiny import model, pairs, tokenizer
from trl import DPOConfig

from lengthwise.integrations.trl import DPOTrainer

arguments = DPOConfig(
    "runs/dpo",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
    bf16=False,
    max_length=None,
)
trainer = DPOTrainer(
    model=model(),
    ref_model=model(),
    args=arguments,
    train_dataset=pairs(),
    processing_class=tokenizer(),
)
trainer.train()
