"""Adam and RMSprop over stacked parameters, with a separate weight decay for every regularisation.

Weight decay is coupled, as in torch's `Adam(weight_decay=...)`: it is added to the gradients of weights and biases.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam

OptimizerName = Literal["adam", "rmsprop"]
DEFAULT_RATES: dict[OptimizerName, float] = {"adam": 1e-3, "rmsprop": 1e-2}  # torch's own

_EPSILON = 1e-8
_BETAS = (0.9, 0.999)
_SMOOTHING = 0.99  # RMSprop's


@dataclass
class Updates:
    """Optimizer state of stacked parameters, all after the same number of steps."""

    name: OptimizerName
    learning_rate: float
    decay: Tensor
    """(S, R) weight decays."""
    moments: list[list[Tensor]]
    """First and second moment (adam) or second moment (rmsprop) of each parameter, in its shape."""
    num_steps: int = 0
    _scratch: list[Tensor] = field(default_factory=list)
    _counts: list[Tensor] = field(default_factory=list)

    @classmethod
    def start(cls, name: OptimizerName, learning_rate: float, decay: Tensor, parameters: list[Tensor]) -> "Updates":
        """State before the first step."""
        kinds = 2 if name == "adam" else 1
        return cls(name, learning_rate, decay, [[torch.zeros_like(p) for _ in range(kinds)] for p in parameters])

    def narrow(self, sets: slice) -> "Updates":
        """A view of some of the sets: its steps change this state's moments, not its `num_steps`."""
        views = [[moment[sets] for moment in moments] for moments in self.moments]
        return Updates(self.name, self.learning_rate, self.decay[sets], views, self.num_steps)

    def step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Make one step in place; the gradients, those of the loss without weight decay, are overwritten."""
        self.num_steps += 1
        for parameter, gradient in zip(parameters, gradients, strict=True):
            gradient.addcmul_(parameter, self.decay.view(*self.decay.shape, *[1] * (parameter.ndim - 2)))
        if self.name == "adam":
            self._adam(parameters, gradients)
        else:
            self._rmsprop(parameters, gradients)

    def _adam(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not self._counts:
            before = float(self.num_steps - 1)
            self._counts = [torch.tensor(before) for _ in parameters]
        adam(
            parameters,
            gradients,
            [first for first, _ in self.moments],
            [second for _, second in self.moments],
            [],
            self._counts,  # incremented by the call
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=self.learning_rate,
            weight_decay=0.0,  # differs between regularisations: see `step`
            eps=_EPSILON,
            maximize=False,
        )

    def _rmsprop(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not self._scratch:
            self._scratch = [torch.empty_like(parameter) for parameter in parameters]
        for parameter, gradient, (square,), scratch in zip(
            parameters, gradients, self.moments, self._scratch, strict=True
        ):
            square.mul_(_SMOOTHING).addcmul_(gradient, gradient, value=1 - _SMOOTHING)
            torch.sqrt(square, out=scratch).add_(_EPSILON)
            parameter.addcdiv_(gradient, scratch, value=-self.learning_rate)
