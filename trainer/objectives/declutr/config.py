"""Settings of the objectives, readable without torch. The losses are in trainer/objectives/."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from common.config import Strict
from trainer.objectives.declutr.masking import MaskingConfig


class NTXentConfig(Strict):
    """NT-Xent (DeCLUTR eq. 1 divided by its 2M terms), computed in at least float32, exact at any temperature."""

    kind: Literal["ntxent"] = "ntxent"
    temperature: float = Field(default=0.05, gt=0)
    """Divides the cosine similarities."""


class MetricLearningConfig(Strict):
    """Any loss and miner of pytorch-metric-learning, by name. Its NTXentLoss needs O(M^3) memory."""

    kind: Literal["pytorch_metric_learning"]
    loss: str
    """Class name in pytorch_metric_learning.losses, for example NTXentLoss or SupConLoss."""
    loss_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss, for example {temperature: 0.05}."""
    miner: str | None = None
    """Class name in pytorch_metric_learning.miners."""
    miner_arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the miner."""

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return _known("losses", name)

    @field_validator("miner")
    @classmethod
    def _known_miner(cls, name: str | None) -> str | None:
        return name if name is None else _known("miners", name)


def _known(module: str, name: str) -> str:
    import pytorch_metric_learning.losses
    import pytorch_metric_learning.miners

    choices = vars(getattr(pytorch_metric_learning, module))
    if name.startswith("_") or not isinstance(choices.get(name), type):
        names = sorted(key for key, value in choices.items() if isinstance(value, type))
        raise ValueError(f"pytorch_metric_learning.{module} has no {name!r}; it has {', '.join(names)}")
    return name


def _ntxent_unless_said(value: Any) -> Any:
    """`loss: {temperature: 0.1}` means NT-Xent: the kind need not be repeated to change one number."""
    return {"kind": "ntxent", **value} if isinstance(value, dict) else value


ContrastiveLossConfig = Annotated[
    NTXentConfig | MetricLearningConfig, Field(discriminator="kind"), BeforeValidator(_ntxent_unless_said)
]


class DeclutrConfig(Strict):
    """What is minimised: contrastive + MLM (paper eq. 3), or one of them alone (paper Figure 3)."""

    kind: Literal["declutr"] = "declutr"
    terms: Literal["both", "contrastive", "mlm"] = "both"
    """Which losses are summed."""
    loss: ContrastiveLossConfig = NTXentConfig()
    """The contrastive loss."""
    masking: MaskingConfig = MaskingConfig()
    """How anchors are masked for MLM."""
    contrast_unmasked_anchors: bool = False
    """Embed anchors a second time without masks for the contrastive loss; the released code contrasts masked ones."""
    queue_size: int = Field(default=0, ge=0)
    """Embeddings of earlier steps kept as extra negatives (the paper's memory bank); 0: none."""
    released_rank_scaling: bool = False
    """Multiply the contrastive gradient by 1 / world size, as the released configs do on several GPUs."""

    @model_validator(mode="after")
    def _queue_needs_ntxent(self) -> "DeclutrConfig":
        if self.queue_size and self.loss.kind != "ntxent":
            raise ValueError(f"queue_size = {self.queue_size} needs loss kind ntxent, not {self.loss.kind}")
        return self

    @property
    def contrastive(self) -> bool:
        """Is the contrastive loss computed?"""
        return self.terms != "mlm"

    @property
    def mlm(self) -> bool:
        """Is the MLM loss computed?"""
        return self.terms != "contrastive"

    @property
    def unmasked_anchors(self) -> bool:
        """Are anchors packed twice, masked for MLM and unmasked for the contrastive loss?"""
        return self.contrast_unmasked_anchors and self.terms == "both"


ObjectiveConfig = DeclutrConfig
"""The union of all objectives' settings."""
