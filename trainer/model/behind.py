"""Steps behind the pooling of a sentence encoder, as sentence-transformers computes them: dense layers, normalisation.

Legend: S spans, D embedding size.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


class Normalize(nn.Module):
    """e / |e|; a null vector stays null."""

    def forward(self, embeddings: Tensor) -> Tensor:
        """Map `(S, D)` to `(S, D)`."""
        return F.normalize(embeddings, dim=-1)


@dataclass(frozen=True)
class Dense:
    """A linear layer with its activation, such as `nn.Tanh()` or `nn.Identity()`."""

    linear: nn.Linear
    activation: nn.Module
