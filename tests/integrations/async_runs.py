"""Runs of TRL's AsyncGRPO, plain in one process and planned on ranks, over the same rollouts, of which few are long."""

import queue
import random
import warnings
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from grpo_runs import GROUP, in_place, prompts
from grpo_runs import SETTINGS as OF_GRPO
from preferences import tokenizer
from safetensors.torch import load_file
from trainers import Kept, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of TRL, that it is experimental
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    from lengthwise.integrations.async_grpo import AsyncGRPOTrainer as Planned  # noqa: F401

LONGEST = 100
SETTINGS = {
    **OF_GRPO,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 2048,
    "max_steps": 3,
    "model_init_kwargs": {"dtype": torch.float64},
    "token_budget": 0,
}


def rollouts(count=48):
    """Return rollouts in groups with one prompt, few of them long, some with a tool's tokens, one that trains none."""
    draw = random.Random(11)
    for group in range(count // GROUP):
        prompt = [draw.randrange(4, 260) for _ in range(draw.choice([1, 2, 5, 20]))]
        for place in range(GROUP):
            length = draw.choice([1, 2, 3, 5, 8, 8, 12, 20])
            length = LONGEST - len(prompt) if (group, place) in ((0, 1), (4, 2)) else length
            mask = [int(number % 5 != 3) for number in range(length)]
            mask = [0] * length if (group, place) == (1, 3) else mask
            ids = np.array([*prompt, *(draw.randrange(4, 260) for _ in mask)])
            logps = [0.0] * len(prompt) + [-5.5 - 0.4 * draw.random() for _ in mask]
            metrics = {"reward": draw.random(), "tools/call_frequency": draw.random()}
            if place:
                metrics.pop("tools/call_frequency")
            yield RolloutSample(
                prompt=[],
                completion=[],
                input_ids=ids,
                completion_mask=np.array([0] * len(prompt) + mask),
                old_log_probs=np.array(logps, np.float32),
                advantage=draw.uniform(-2, 2),
                model_version=0,
                group_id=group,
                metrics=metrics,
            )


class Buffer(queue.Queue):
    """Does not wait for rollouts."""

    def get(self, block=True, timeout=None):
        return super().get(block=False)


class Worker:
    """Has its rollouts from the start, and keeps what the trainer says."""

    def __init__(self, samples):
        self._loop_kwargs = {"dataset_start_index": 0}  # as TRL's own worker has
        self.rollout_buffer, self.metrics_queue, self.calls = Buffer(), queue.Queue(), []
        for each in samples:
            self.rollout_buffer.put(each)
        self.metrics_queue.put({"rollout/generated_total": 3.0})

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")

    def update_model_version(self, model_version):
        self.calls.append(model_version)

    def check_health(self, stale_after_s):
        raise RuntimeError(f"no rollout for {stale_after_s} seconds")


class Transfer:
    """Stands for the server and its client: keeps names and sums of the weights."""

    def __init__(self):
        self.sent = []

    def init_weight_transfer(self):
        """Do nothing."""

    pause = resume = destroy = wait_for_server_ready = init_weight_transfer

    def get_server_info(self):
        return {"lora_config": {"max_lora_rank": 8, "max_loras": 8}, "parallel_config": {"data_parallel_size": 1}}

    def send_weights(self, iterator):
        self.sent.append({name: each.double().abs().sum().item() for name, each in iterator})

    def load_lora_adapter(self, name, path):
        self.send_weights(load_file(f"{path}/adapter_model.safetensors").items())


def flash(query, key, value, starts_q, starts_k, *_, softmax_scale, causal, window_size):
    """Compute what FlashAttention 3, which needs a Hopper GPU, computes for TRL's packed rows, (tokens, heads, dim)."""
    assert (causal, window_size) == (True, (-1, -1))
    found = []
    for row in range(len(starts_q) - 1):
        q, k, v = (
            each[starts[row] : starts[row + 1]].transpose(0, 1)
            for each, starts in ((query, starts_q), (key, starts_k), (value, starts_k))
        )
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        how = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
        found.append(F.scaled_dot_product_attention(q[None], k[None], v[None], **how)[0].transpose(0, 1))
    return torch.cat(found)


class Flash:
    flash_attn_varlen_func = staticmethod(flash)


class Plain(AsyncGRPOTrainer):
    """TRL's trainer, without the loader of accelerate, which reads one batch ahead and so logs it a step early."""

    def get_train_dataloader(self):
        with patch.object(self.accelerator, "prepare", lambda loader: loader):
            return super().get_train_dataloader()


@contextmanager
def on_cpu():
    """Replace the two parts of TRL's trainer that need a GPU, and keep fp64, inside the block."""
    with ExitStack() as stack:
        stack.enter_context(in_place(torch.float64))
        stack.enter_context(patch("trl.experimental.async_grpo.packing._flash_attn", Flash))
        peak = "trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device"
        stack.enter_context(patch(peak, lambda *_: None))
        yield


def trained(
    kind, folder, ranks, model, *, samples=None, resume=None, config=None, update=12, sends_adapters=False, **options
):
    """Train; return what was logged, the weights, what the server got, and the trainer.

    update: rollouts of a batch. sends_adapters: whether the server has adapters of its own, which TRL then sends alone.
    """
    args = AsyncGRPOConfig(
        str(folder), **{**SETTINGS, "per_device_train_batch_size": update // ranks, **(config or {})}
    )
    kept, worker, transfer = Kept(), Worker(rollouts() if samples is None else samples), Transfer()
    given = {"processing_class": tokenizer(), "train_dataset": prompts(9), **options}
    given |= {"rollout_worker": worker, "weight_transfer": None if sends_adapters else transfer}
    with on_cpu(), patch("trl.experimental.async_grpo.async_grpo_trainer.VLLMClient", lambda *_: transfer):
        trainer = kind(str(model), args=args, callbacks=[kept], **given)
        trainer.train(resume_from_checkpoint=resume)
    found = {"logs": kept.logs, "weights": weights_of(trainer), "trainer": trainer}
    return {**found, "sent": transfer.sent, "calls": worker.calls}
