"""QLoRA as TRL has it, planned: adapters on a base in 4 bits.

On 8 GPUs: torchrun --nproc-per-node 8 qlora.py
"""

import os

import datasets
import torch
from peft import LoraConfig
from tiny import chats, model, tokenizer
from transformers import BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar
from trl import SFTConfig

from lengthwise.integrations.trl import SFTTrainer

datasets.disable_progress_bars()
disable_progress_bar()
on_gpus = torch.cuda.is_available()
folder = "runs/qlora/base"  # or a model of the hub, such as Qwen/Qwen3-8B
model().save_pretrained(folder)
trainer = SFTTrainer(
    model=folder,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if on_gpus else torch.float32,
    ),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        "runs/qlora",
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=not on_gpus,
        bf16=False,
        max_length=None,
        assistant_only_loss=True,
    ),
    train_dataset=chats(),
    processing_class=tokenizer(),
)
trainer.train()
