"""SentEval's classifiers as one network: parameters stacked over training sets and regularisations.

Shapes: S training sets, R regularisations, B rows of a batch, C classes, D features.
Classifiers of one set read the same rows. So the R layers of a set are one matrix product of R*C outputs, and all sets
together one batched product. Rows come last in activations, so that softmax runs along contiguous memory. Gradients
are written out, because autograd's bookkeeping costs more than the arithmetic of layers this small.

Adam and RMSprop update the stacked parameters, with a separate weight decay for every regularisation.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.adam import adam

from declutr.common.config import Strict

OptimizerName = Literal["adam", "rmsprop"]
DEFAULT_RATES: dict[OptimizerName, float] = {"adam": 1e-3, "rmsprop": 1e-2}  # torch's own


class ClassifierConfig(Strict):
    """Settings of the classifiers. The defaults are those of the papers' tables: adam, batches of 64, 10 folds."""

    optimizer: OptimizerName = "adam"  # adam or rmsprop, with torch's other defaults
    # Learning rate; None means the optimizer's default, 1e-3 for adam and 1e-2 for rmsprop.
    learning_rate: float | None = Field(None, gt=0)
    batch_size: int = Field(64, ge=1)  # rows per step
    # Tolerated dev scores without a new best, counted in total, not in a row; one more stops the fit.
    tenacity: int = Field(5, ge=0)
    epoch_size: int = Field(4, ge=1)  # passes between two dev scores
    max_epoch: int = Field(200, ge=0)  # last pass after which another block of passes may start
    num_folds: int = Field(10, ge=2)  # k of the cross-validations
    # Weight decays to choose from, by dev score; the first of equal ones wins.
    decays: tuple[float, ...] = Field((1e-5, 1e-4, 1e-3, 1e-2), min_length=1)
    # Seed of starting weights, orders and held-out rows; InnerKFold's folds always use 1111.
    seed: int = Field(1111, ge=0, lt=2**32)  # NumPy's RandomState takes no larger one

    @classmethod
    def prototyping(cls) -> Self:
        """SentEval's quick configuration: rmsprop, batches of 128, 5 folds."""
        return cls(optimizer="rmsprop", batch_size=128, tenacity=3, epoch_size=2, num_folds=5)

    def for_snli(self) -> "ClassifierConfig":
        """Settings for SNLI: one weight decay near 0, a dev score after each pass, 15 passes and one more."""
        return self.model_copy(update={"decays": (1e-9,), "max_epoch": 15, "epoch_size": 1})

    def identity(self) -> dict[str, Any]:
        """What decides scores, with the settings that stored scores of earlier versions name too: so these stay."""
        return self.model_dump(mode="json") | {"num_hidden": 0, "dropout": 0.0}

    @property
    def rate(self) -> float:
        """The learning rate in effect."""
        return DEFAULT_RATES[self.optimizer] if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True)
class Network:
    """A linear layer for each set and regularisation."""

    parameters: list[Tensor]  # weight (S, R, C, D) and bias (S, R, C)

    @property
    def num_sets(self) -> int:
        """S."""
        return len(self.parameters[0])

    def narrow(self, sets: slice) -> "Network":
        """A view of some of the sets."""
        return Network([parameter[sets] for parameter in self.parameters])

    def forward(self, rows: Tensor) -> Tensor:
        """Logits (S, R, C, B) of `rows` (S, B, D)."""
        weight, bias = self.parameters
        # the weight times the transposed rows: 6 us a set, and 20 the other way round (docs/evidence/log.md)
        return torch.baddbmm(bias.view(len(bias), -1, 1), weight.flatten(1, 2), rows.mT).view(*bias.shape, -1)

    def backward(self, rows: Tensor, grad: Tensor, out: list[Tensor]) -> None:
        """Write the gradient of both parameters into `out`, given that of the logits (S, R, C, B)."""
        torch.bmm(grad.flatten(1, 2), rows, out=out[0].view(len(rows), -1, rows.shape[-1]))
        torch.sum(grad, dim=-1, out=out[1])


def linear_start(inputs: int, outputs: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Weight and bias with which `torch.nn.Linear(inputs, outputs)` would start from this generator state."""
    weight = torch.empty(outputs, inputs)
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=stream)
    bound = 1 / math.sqrt(inputs)
    return weight, torch.empty(outputs).uniform_(-bound, bound, generator=stream)


_EPSILON = 1e-8  # this, _BETAS and _SMOOTHING are torch's defaults
_BETAS = (0.9, 0.999)
_SMOOTHING = 0.99  # RMSprop's


@dataclass
class Updates:
    """Optimizer state of stacked parameters, all after the same number of steps."""

    name: OptimizerName
    learning_rate: float
    decay: Tensor  # (S, R) weight decays
    # First and second moment (adam) or second moment (rmsprop) of each parameter, in its shape.
    moments: list[list[Tensor]]
    num_steps: int = 0
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
            # Decay is coupled, as in torch's `Adam(weight_decay=...)`, and of biases too.
            gradient.addcmul_(parameter, self.decay.view(*self.decay.shape, *[1] * (parameter.ndim - 2)))
        if self.name == "adam":
            self._adam(parameters, gradients)
        else:
            self._rmsprop(parameters, gradients)

    def _adam(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        if not self._counts:  # one for each parameter, because the call increments them
            before = float(self.num_steps - 1)
            self._counts = [torch.tensor(before) for _ in parameters]
        adam(
            parameters,
            gradients,
            [first for first, _ in self.moments],
            [second for _, second in self.moments],
            [],
            self._counts,
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
        for parameter, gradient, (square,) in zip(parameters, gradients, self.moments, strict=True):
            square.mul_(_SMOOTHING).addcmul_(gradient, gradient, value=1 - _SMOOTHING)
            root = square.sqrt().add_(_EPSILON)  # outside of the root, as in torch
            parameter.addcdiv_(gradient, root, value=-self.learning_rate)
