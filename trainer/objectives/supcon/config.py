"""Settings of SupCon and its checks before a run, readable without torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict
from declutr.common.errors import missing_extra
from declutr.pipeline.shards.content import ContentKind
from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext

Fraction = Annotated[float, Field(ge=0, le=1)]


class CropConfig(Strict):
    """Two views of an image: crops with changed colours. The defaults are those of VisualCSE, as in SimCLR."""

    min_scale: float = Field(default=0.2, gt=0, le=1)
    """Smallest area of a crop as a fraction of the image's."""
    hflip: Fraction = 0.5
    """Probability of a horizontal flip."""
    color_jitter_prob: Fraction = 0.8
    """Probability of changed brightness, contrast, saturation and hue."""
    color_jitter: float = Field(default=0.4, ge=0, le=1)
    """Largest change of brightness, contrast and saturation; a quarter for hue."""
    grayscale_prob: Fraction = 0.2
    """Probability of a grey image."""


class MaskConfig(Strict):
    """SpecAugment (Park et al. 2019): one range of mel bands and one of frames is set to 0. 0: dropout alone."""

    freq_mask: int = Field(default=0, ge=0)
    """Largest number of masked mel bands (48 in AudioCSE)."""
    time_mask: int = Field(default=0, ge=0)
    """Largest number of masked frames (192 in AudioCSE), at most half."""
    shared: bool = False
    """Both views have the same masks, as in AudioCSE."""


class SupconConfig(ObjectiveConfig):
    """SupCon (Khosla et al. 2020) or SimCLR on images or sounds (VisualCSE, AudioCSE)."""

    implementation: ClassVar[str] = "declutr.trainer.objectives.supcon.objective:Supcon"
    metrics: ClassVar[tuple[str, ...]] = ("supcon",)
    reads: ClassVar[tuple[ContentKind, ...]] = ("images", "audio")
    method: ClassVar[str] = "SupCon"

    kind: Literal["supcon"] = "supcon"
    labels: bool = True
    """true: rows of one label are positives (SupCon). false: the two views of a row (SimCLR)."""
    temperature: float = Field(default=0.07, gt=0)
    """Divisor of the cosine similarities."""
    base_temperature: float = Field(default=0.07, gt=0)
    """The loss is multiplied by temperature / base_temperature."""
    reference_supcon: bool = False
    """The loss of VisualCSE's scripts (`--new_supcon`), for reproductions alone."""
    head: bool = True
    """Linear layer with tanh behind the pooling; not exported."""
    crops: CropConfig = CropConfig()
    """Views of images."""
    masks: MaskConfig = MaskConfig()
    """Views of sounds."""
    mixup: Fraction = 0.0
    """Probability that a clip is mixed with another (AudioCSE: 0.5). Sounds only."""

    @model_validator(mode="after")
    def _scaled(self) -> "SupconConfig":
        if self.reference_supcon and self.base_temperature != type(self).model_fields["base_temperature"].default:
            raise ValueError("base_temperature has no effect with reference_supcon = true; remove it")
        return self

    @property
    def needs_dropout(self) -> bool:
        """True if the views of a sound have the same masks."""
        return self.masks.shared

    @property
    def forms_classes(self) -> bool:
        """True with labels."""
        return self.labels

    @property
    def learns(self) -> str:
        """Supervision by the labels of the data, or none."""
        return "with the labels of the data" if self.labels else "without labels"

    @property
    def dropped(self) -> tuple[str, ...]:
        """The head."""
        return ("a linear layer with tanh behind the pooling",) if self.head else ()

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reports data without labels, and patches that do not fit the data."""
        content, frontend, problems = manifest.content, run.frontend, []
        if absent := missing_extra(content.kind, f"data with {content.kind}"):
            problems.append(absent)
        if frontend is None:
            return [f"{content.kind} need a frontend; set `frontend: {{}}` or its settings"]
        if self.labels and getattr(content, "label", None) is None:
            problems.append(
                "objective.labels = true: the shards have no labels; set it to false, or prepare with labels"
            )
        if run.batch_documents < 2:
            problems.append(f"batch_documents = {run.batch_documents}: a contrast needs at least 2 rows")
        height, width = frontend.patch_size
        if content.kind == "images" and (frontend.image_size % height or frontend.image_size % width):
            problems.append(
                f"frontend.image_size = {frontend.image_size}: must be a multiple of both sides of "
                f"frontend.patch_size = {list(frontend.patch_size)}"
            )
        if content.kind == "images" and (self.mixup or self.masks != MaskConfig()):
            problems.append("objective.mixup and objective.masks are for sounds; the shards hold images; remove them")
        if content.kind == "audio":
            if isinstance(frontend.mean, tuple) or isinstance(frontend.std, tuple):
                problems.append("frontend.mean and frontend.std: sounds have one channel; give one number each")
            num_mel_bins = int(getattr(content, "num_mel_bins", 0))
            if width > num_mel_bins:
                problems.append(
                    f"frontend.patch_size = {list(frontend.patch_size)}: the shards have {num_mel_bins} mel bands"
                )
            if frontend.pretrained is not None:
                problems.append("frontend.pretrained: a ViT reads images, not sounds; remove it")
        return problems
