"""Parameter groups, clipping, AdamW with and without bias correction, and the learning rate of a step."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from declutr.trainer.parallel.communicator import full_tensor, is_part
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.torch_private import fused_adamw, multiply_all

_LATE_STEP = 1e30  # beta ** step is 0


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of the 1-based optimizer step t of T.

    Slanted triangular (Howard and Ruder 2018, eq. 3): cut = int(cut_fraction * T); p = t / cut before the cut, else
    1 - (t - cut) / (T - cut); rate = lr * (1 + (ratio - 1) * p) / ratio.

    The others are those of transformers, whose steps s = t - 1 start at 0: W = ceil(warmup_ratio * T); rate =
    lr * s / W for s < W, then with p = (s - W) / (T - W): linear lr * (1 - p), cosine lr * (1 + cos(pi p)) / 2,
    constant lr.
    """
    if config.schedule == "slanted_triangular":
        cut = int(config.cut_fraction * total_steps)
        share = step / cut if step < cut else 1 - (step - cut) / max(1, total_steps - cut)
        return config.lr * (1 + (config.ratio - 1) * share) / config.ratio
    done, warmup = step - 1, math.ceil(config.warmup_ratio * total_steps)  # ceil, as transformers' Trainer rounds
    if done < warmup:
        return config.lr * done / warmup
    share = (done - warmup) / max(1, total_steps - warmup)  # a run may be all warm-up
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


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scales gradients down to a total norm of at most `max_norm`, if it is given; returns the norm before, a scalar.

    The norms of sharded and replicated parameters are summed separately, because torch cannot stack both kinds.
    """
    kinds = [[p for p in parameters if is_part(p) == sharded] for sharded in (True, False)]
    kinds = [kind for kind in kinds if kind]  # most runs have one kind, which torch clips itself
    if len(kinds) == 1:
        return full_tensor(torch.nn.utils.clip_grad_norm_(kinds[0], math.inf if max_norm is None else max_norm))
    gradients = [[p.grad for p in kind if p.grad is not None] for kind in kinds]
    norms = [full_tensor(torch.nn.utils.get_total_norm(group)) for group in gradients]
    norm = math.hypot(*map(float, norms))
    if max_norm is not None:
        factor = max_norm / (norm + 1e-6)  # as torch clips
        for group in gradients:
            multiply_all(group, min(1.0, factor))
    return torch.tensor(norm, dtype=torch.float64, device=norms[0].device)  # float64: no digit of the sum is lost


def build_optimizer(
    config: OptimConfig,  # settings of the optimizer
    encoder: nn.Module,  # the encoder
    *modules: nn.Module,  # objectives and frontends
    # ids of the encoder's parameters that get a gradient; None: all that are trainable.
    reached: Collection[int] | None = None,
    fused: bool | None = None,  # update all parameters by one kernel; None: on a GPU
) -> torch.optim.Optimizer:
    """The optimizer over trainable parameters, in separate groups for each module."""
    groups = parameter_groups(encoder, config.weight_decay)
    if reached is not None:
        # else weight decay would change what no task of the update trains
        groups = [{**group, "params": [p for p in group["params"] if id(p) in reached]} for group in groups]
    groups += [group for part in modules for group in parameter_groups(part, config.weight_decay) if group["params"]]
    fused = next(encoder.parameters()).is_cuda if fused is None else fused
    if not config.bias_correction:
        return UncorrectedAdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


class UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW as in transformers 3.4 with correct_bias=False: no bias correction, decay after the update.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = w - lr m / (sqrt(v) + eps); w = w - lr decay w.
    """

    def __init__(
        self,
        params: Iterable[Any],  # parameters or their groups
        lr: float,  # learning rate
        betas: tuple[float, float],  # b1 and b2
        eps: float,  # see the equation
        weight_decay: float = 0.0,  # see the equation
        fused: bool = False,  # update all parameters by torch's fused kernel
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.found_inf: Tensor | None = None  # 1: leave out an update, else 0; None: none is left out. Only if fused
        self._fused = fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no loss is computed again
        """One update of every parameter that has a gradient."""
        if closure is not None:
            raise TypeError("a closure is not called: the loss of a step is computed before")
        for group in self.param_groups:
            # As torch's AdamW does.
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                state: dict[str, Tensor] = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            if self._fused:
                self._update_fused(group, parameters)
                continue
            for parameter in parameters:
                self._update(group, parameter, **self.state[parameter])

    def _update(self, group: dict[str, Any], parameter: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        (first, second), gradient = group["betas"], parameter.grad
        assert gradient is not None
        exp_avg.lerp_(gradient, 1 - first)
        exp_avg_sq.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        parameter.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(group["eps"]), value=-group["lr"])
        parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])  # after the update, as released

    def _update_fused(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """The same in one kernel, which corrects the bias of a step so late that the correction is exactly 1."""
        if not parameters:
            return
        first, second = group["betas"]
        late = torch.full((), _LATE_STEP, device=parameters[0].device)
        fused_adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [self.state[parameter]["exp_avg"] for parameter in parameters],
            [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
            [],
            [late] * len(parameters),
            lr=group["lr"],
            beta1=first,
            beta2=second,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if decay := group["lr"] * group["weight_decay"]:
            kept = 1 - decay if self.found_inf is None else 1 - decay * (1 - self.found_inf)
            multiply_all(parameters, kept)
