"""Parameter groups, clipping, AdamW with and without bias correction, and the learning rate of a step."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from trainer.parallel.sharding import whole
from trainer.parallel.world import is_part
from trainer.step.settings import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of the 1-based optimizer step t of T.

    Slanted triangular (Howard and Ruder 2018, eq. 3): cut = int(cut_fraction * T); p = t / cut before the cut, else
    1 - (t - cut) / (T - cut); rate = lr * (1 + (ratio - 1) * p) / ratio.

    The others are those of transformers, whose steps s = t - 1 start at 0: W = ceil(warmup_fraction * T); rate =
    lr * s / W for s < W, then with p = (s - W) / (T - W): linear lr * (1 - p), cosine lr * (1 + cos(pi p)) / 2,
    constant lr.
    """
    if config.schedule == "slanted_triangular":
        cut = int(config.cut_fraction * total_steps)
        share = step / cut if step < cut else 1 - (step - cut) / max(1, total_steps - cut)
        return config.lr * (1 + (config.ratio - 1) * share) / config.ratio
    done, warmup = step - 1, math.ceil(config.warmup_fraction * total_steps)
    if done < warmup:
        return config.lr * done / warmup
    share = (done - warmup) / max(1, total_steps - warmup)
    factors = {"linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share)), "constant": 1.0}
    return config.lr * max(0.0, factors[config.schedule])


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: with decay, and without it (biases and weights of normalisation layers)."""
    bare = {
        id(p) for layer in module.modules() if "Norm" in type(layer).__name__ for p in layer.parameters(recurse=False)
    }
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            (no_decay if id(parameter) in bare or name.endswith("bias") else decay).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> float:
    """Scales gradients down to a total norm of at most `max_norm`, if it is given; returns the norm before.

    The norms of sharded and replicated parameters are summed separately, because torch cannot stack both kinds.
    """
    kinds = [[p for p in parameters if is_part(p) == sharded] for sharded in (True, False)]
    kinds = [kind for kind in kinds if kind]
    if len(kinds) == 1:
        return float(whole(torch.nn.utils.clip_grad_norm_(kinds[0], math.inf if max_norm is None else max_norm)))
    gradients = [[p.grad for p in kind if p.grad is not None] for kind in kinds]
    norm = math.hypot(*(float(whole(torch.nn.utils.get_total_norm(some))) for some in gradients))
    if max_norm is None:
        return norm
    factor = max_norm / (norm + 1e-6)  # as torch clips
    for some in gradients:
        torch._foreach_mul_(some, min(1.0, factor))
    return norm


def build_optimizer(
    config: OptimConfig, encoder: nn.Module, *others: nn.Module, reached: Collection[int] | None = None
) -> torch.optim.Optimizer:
    """The optimizer over trainable parameters, in separate groups for each module.

    Args:
        config: settings of the optimizer.
        encoder: the encoder.
        others: objectives and frontends.
        reached: ids of the encoder's parameters that get a gradient; None: all that are trainable.
    """
    groups = parameter_groups(encoder, config.weight_decay)
    if reached is not None:
        groups = [{**group, "params": [p for p in group["params"] if id(p) in reached]} for group in groups]
    groups += [group for one in others for group in parameter_groups(one, config.weight_decay) if group["params"]]
    if not config.bias_correction:
        return UncorrectedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    fused = next(encoder.parameters()).is_cuda  # one kernel for all parameters
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


class UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW as in transformers 3.4 with correct_bias=False: no bias correction, decay after the update.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = w - lr m / (sqrt(v) + eps); w = w - lr decay w.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state: dict[str, Tensor] = self.state[parameter]
                    if not state:
                        state["exp_avg"], state["exp_avg_sq"] = (
                            torch.zeros_like(parameter),
                            torch.zeros_like(parameter),
                        )
                    state["exp_avg"].lerp_(parameter.grad, 1 - first)
                    state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                    denominator = state["exp_avg_sq"].sqrt().add_(group["eps"])
                    parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"])
                    parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
        return loss
