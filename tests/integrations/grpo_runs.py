"""Runs of TRL's GRPO, plain in one process and planned on ranks, over the same completions, of which few are long."""

import os
import random
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation

from integrations.preferences import tokenizer
from integrations.trainers import Kept, difference, weights_of
from lengthwise.integrations.trl import GRPOTrainer as PlannedGRPOTrainer
from lengthwise.integrations.trl import RLOOTrainer as PlannedRLOOTrainer
from lengthwise.models import keep_double

ROWS, GROUP = 12, 4
TIMES = ("runtime", "per_second", "step_time", "total_flos")
SETTINGS = {
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "num_generations": GROUP,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "max_completion_length": 61,
    "max_grad_norm": 0.3,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "seed": 3,
    "gradient_checkpointing": False,
    "log_level": "error",
}


class WideHead:
    """TRL's fused head in the weights' precision: its own computes in fp32, which hides all below 1e-8."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, _chunk, softcap, scale, outputs):
        assert (bias, softcap, scale) == (None, None, 1.0)
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1) if "entropy" in outputs else None
        return logps.gather(1, labels[:, None])[:, 0], entropy, None, None, None


def completion(prompt, place, step):
    """Return a completion that depends on neither ranks nor weights; few are long, and some are cut short."""
    draw = random.Random(f"{prompt} {place} {step}")
    length = draw.choice([1, 2, 3, 5, 8, 8, 12, 20, 60])
    return [draw.randrange(4, 260) for _ in range(length)] + [1] * (draw.random() < 0.7 or length < 60)


class Server:
    """Stands for TRL's client of a vLLM server: reads the weights, and samples elsewhere."""

    def __init__(self, *, model, accelerator, **_):
        self.model, self.accelerator, self.weights = model, accelerator, []
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.vllm_client = SimpleNamespace(get_server_info=lambda: info)

    def sync_weights(self):
        total = sum(each.double().abs().sum() for each in self.model.parameters())  # others than rank 0 send nothing
        self.weights.append(total.item() if self.accelerator.is_main_process else None)

    def generate(self, prompts, images, num_generations, profiler):
        first = self.accelerator.process_index * len(prompts)
        places = [(first + number) % GROUP for number in range(len(prompts))]
        found = [completion(ids, place, len(self.weights)) for ids, place in zip(prompts, places, strict=True)]
        logps = [[[-5.5 - 0.1 * ((7 * n) % 5)] for n in range(len(ids))] for ids in found]
        return prompts, found, logps, None


class Colocated:
    """Stands for vLLM's engine in this process, below TRL's code: has weights and a cache while it is awake."""

    parts = frozenset({"weights", "kv_cache"})

    def __init__(self, *, seed, enable_sleep_mode, tensor_parallel_size, **_):
        self.group, self.sleeps, self.size = seed, enable_sleep_mode, tensor_parallel_size
        self.awake, self.loaded, self.weights = self.parts, {}, []
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self)))
        self.llm_engine = self

    def sleep(self, level):
        assert (level, self.sleeps) == (2, True)
        self.awake, self.loaded = frozenset(), {}  # level 2 discards the weights

    def wake_up(self, tags):
        self.awake |= set(tags)

    def load_weights(self, named):
        assert "weights" in self.awake
        self.loaded |= {name: each.double().abs().sum().item() for name, each in named}

    def reset_prefix_cache(self):
        self.weights.append(sum(self.loaded.values()))

    def generate(self, prompts, sampling_params, use_tqdm):
        assert self.awake == self.parts
        assert self.loaded
        return [self.output(self.group * len(prompts) + n, each["prompt_token_ids"]) for n, each in enumerate(prompts)]

    def output(self, number, ids):
        found = completion(ids, number % GROUP, len(self.weights))
        logps = [{each: SimpleNamespace(rank=1, logprob=-5.5 - 0.1 * ((7 * n) % 5))} for n, each in enumerate(found)]
        return SimpleNamespace(prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=found, logprobs=logps)])


class Sampled:
    """Draws completions; with `generates` takes those of transformers, cut by their place in the group."""

    generates = False

    def _generate_single_turn(self, prompt_ids, images, fields, *generations, **_):
        is_rloo, step = isinstance(self, RLOOTrainer), self.state.global_step
        if self.use_vllm:
            return super()._generate_single_turn(prompt_ids, images, fields, *generations)
        first = self.accelerator.process_index * len(prompt_ids)
        places = [(first + number) % GROUP for number in range(len(prompt_ids))]
        if self.generates:
            made, _ = super()._generate_single_turn(prompt_ids, images, fields, *generations)
            found = [ids[: 2 + 2 * place] for ids, place in zip(made, places, strict=True)]
        else:
            found = [completion(*each, step) for each in zip(prompt_ids, places, strict=True)]
        return found if is_rloo else (found, None)


class Plain(Sampled, GRPOTrainer):
    pass


class Planned(Sampled, PlannedGRPOTrainer):
    pass


class PlainRLOO(Sampled, RLOOTrainer):
    pass


class PlannedRLOO(Sampled, PlannedRLOOTrainer):
    pass


def with_tools(prompts, trainer):
    """Return rollouts in which some tokens of a completion are a tool's, and have no loss."""
    tokens = [trainer._tokenizer(each)["input_ids"] for each in prompts]
    ids, _ = trainer._generate_single_turn(tokens, None, {}, GROUP)
    masks = [[int(n % 3 != 1) for n in range(len(each))] for each in ids]
    return {"prompt_ids": tokens, "completion_ids": ids, "logprobs": None, "env_mask": masks}


def prompts(count=40):
    draw = random.Random(7)
    texts = ["".join(draw.choices("abcdefgh ", k=draw.choice([2, 3, 9, 30]))) for _ in range(count)]
    return datasets.Dataset.from_list([{"prompt": each} for each in texts])


@contextmanager
def in_place(dtype):
    """Put stand-ins in the place of vLLM, and have TRL and transformers keep fp64, inside the block."""

    def generation(*, mode, **how):
        return Server(**how) if mode == "server" else vllm_generation.VLLMGeneration(mode=mode, **how)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # TRL sets some for vLLM
        for name in ("grpo", "rloo"):
            stack.enter_context(patch(f"trl.trainer.{name}_trainer.VLLMGeneration", generation))
        for name, each in {"LLM": Colocated, "SamplingParams": dict, "is_vllm_available": lambda: True}.items():
            stack.enter_context(patch.object(vllm_generation, name, each, create=True))
        if dtype == torch.float64:
            stack.enter_context(patch("trl.trainer.utils._ChunkedLogProbFunction", WideHead))
        stack.enter_context(keep_double(dtype))
        yield


def trained(kind, folder, ranks, model, *, rows=ROWS, resume=None, config=None, **options):
    """Train; return what was logged, the weights, and the trainer. rows: of all ranks in a batch."""
    generates = options.pop("generates", False)
    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), rows // ranks)
    is_rloo = issubclass(getattr(kind, "func", kind), RLOOTrainer)
    args = (RLOOConfig if is_rloo else GRPOConfig)(str(folder), **{**SETTINGS, **sizes, **(config or {})})

    def reward(prompts, completions, completion_ids, **_):
        first = trainer.accelerator.process_index * len(prompts)
        return [((len(ids) * 7 + 3 * (first + n)) % 11) / 11 for n, ids in enumerate(completion_ids)]

    kept = Kept()
    given = {"processing_class": tokenizer(), "train_dataset": prompts(), "eval_dataset": prompts(9), **options}
    with in_place(model.dtype):
        trainer = kind(model=model, reward_funcs=[reward], args=args, callbacks=[kept], **given)
        trainer.generates = generates
        for number, (name, each) in enumerate(trainer.model.named_parameters()):
            if "lora_B" in name:  # else the reference is the model
                each.data.normal_(std=0.02, generator=torch.Generator().manual_seed(number))
        trainer.train(resume_from_checkpoint=resume)
    return {"logs": kept.logs, "weights": weights_of(trainer), "trainer": trainer}


def compared(found, expected, *, tolerance=1e-5, weights=5e-6, but=()):
    """Compare the weights and every logged number but times, and those with a part of `but` in their names."""
    assert len(found["logs"]) == len(expected["logs"])
    for got, wanted in zip(found["logs"], expected["logs"], strict=True):
        names = {name for name in wanted if not any(each in name for each in but)}
        assert names <= got.keys()
        names = {name for name in names if not any(each in name for each in TIMES)}
        apart = {name: (got[name], wanted[name]) for name in names if got[name] != wanted[name]}
        wrong = {n: (a, b) for n, (a, b) in apart.items() if not abs(a - b) <= tolerance * max(abs(b), 1e-3)}
        assert not wrong
    own, learned = (
        {name.removeprefix("base_model.model."): each for name, each in run["weights"].items()}
        for run in (expected, found)
    )
    if learned:
        assert difference(learned, {name: own[name] for name in learned}) < weights
