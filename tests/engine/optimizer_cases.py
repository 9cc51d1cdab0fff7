"""Every optimizer there is, with arguments that show, and the same of torch, made by hand."""

import torch

CASES = {
    "adamw": {"betas": [0.8, 0.9], "weight_decay": 0.3},
    "adam": {"betas": [0.8, 0.9], "weight_decay": 0.3, "eps": 1e-4},
    "sgd": {"weight_decay": 0.3},
    "sgd momentum": {"momentum": 0.9, "weight_decay": 0.3},
    "lion": {"weight_decay": 0.3},
}
_TORCH = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}


def keys_of(case, **more):
    """The optimizer section of a run file."""
    return {"name": case.split()[0], **CASES[case], **more}


class PlainLion:
    """Lion as its paper writes it, on whole parameters."""

    def __init__(self, groups):
        self.param_groups = groups
        self._average = {}

    def zero_grad(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.grad = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                m = self._average.get(each, torch.zeros_like(each))
                c = 0.9 * m + (1 - 0.9) * each.grad
                each -= group["lr"] * (torch.sign(c) + group["weight_decay"] * each)
                self._average[each] = 0.99 * m + (1 - 0.99) * each.grad


def plain_optimizer(case, parameters):
    """torch's own optimizer on whole parameters, decay only on those of two dimensions."""
    name, args = case.split()[0], {**CASES[case]}
    decay = args.pop("weight_decay", 0.0)
    groups = [
        {"params": [each for each in parameters if (each.dim() >= 2) == decayed], "weight_decay": decay * decayed}
        for decayed in (True, False)
    ]
    if name == "lion":
        return PlainLion(groups)
    return getattr(torch.optim, _TORCH[name])(groups, lr=1.0, foreach=False, **args)
