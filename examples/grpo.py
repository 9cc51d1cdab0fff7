"""`grpo_plain.py`, planned: `torchrun --nproc-per-node 8 grpo.py`."""

import os

from tiny import model, prompts, reward, rollouts, tokenizer
from trl import GRPOConfig

from lengthwise.integrations.trl import GRPOTrainer

arguments = GRPOConfig(
    "runs/grpo",
    per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", "1")),
    num_generations=8,
    max_completion_length=256,
    max_steps=3,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    use_cpu=True,
    bf16=False,
)
trainer = GRPOTrainer(
    model=model(),
    reward_funcs=reward,
    args=arguments,
    train_dataset=prompts(),
    processing_class=tokenizer(),
    rollout_func=rollouts,
)
trainer.train()
