"""`trainer_plain.py`, planned: `torchrun --nproc-per-node 8 trainer.py`."""

import os

from tiny import model, rows, tokenizer
from transformers import DataCollatorForLanguageModeling, TrainingArguments

from lengthwise.integrations.transformers import Trainer

arguments = TrainingArguments(
    "runs/trainer",
    per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(
    model=model(),
    args=arguments,
    train_dataset=rows(),
    data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
)
trainer.train()
