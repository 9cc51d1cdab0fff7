"""`sft_plain.py`, planned: `torchrun --nproc-per-node 8 sft.py`."""

import os

from tiny import chats, model, tokenizer
from trl import SFTConfig

from lengthwise.integrations.trl import SFTTrainer

arguments = SFTConfig(
    "runs/sft",
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
    assistant_only_loss=True,
)
trainer = SFTTrainer(
    model=model(),
    args=arguments,
    train_dataset=chats(),
    processing_class=tokenizer(),
)
trainer.train()
