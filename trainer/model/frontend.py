"""Frontend of a task: hidden states of patches, in place of the word embeddings of the encoder.

Legend: T tokens, F values of a patch, W width of the encoder's embeddings.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from declutr.common import seeding
from declutr.common.errors import EncoderError
from declutr.common.hub import hub_or_cache
from declutr.common.paths import expand
from declutr.trainer.data.batches import PatchBatch
from declutr.trainer.model.bounds import check_code, check_config, check_folder
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.language_model import silence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STD = 0.02  # of new weights, as in ViT


class Frontend(nn.Module):
    """Hidden states of patches x: E x + b + p_place; of CLS: c + p_0 (ViT, Dosovitskiy et al. 2021, eq. 1)."""

    mean: Tensor | float
    std: Tensor | float

    def __init__(
        self,
        config: FrontendConfig,  # settings
        patch_values: int,  # F
        num_places: int,  # largest number of patches of a clip
        width: int,  # W
        seed: int,  # the run's seed, for new weights
        # mean and standard deviation of values, unless the settings have others.
        normal: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__()
        self.config = config
        for name, setting, default in (("mean", config.mean, normal[0]), ("std", config.std, normal[1])):
            if isinstance(setting, tuple):  # a patch has the values of one channel after those of the other
                buffer = torch.tensor(setting, dtype=torch.float64).repeat_interleave(patch_values // len(setting))
                self.register_buffer(name, buffer, persistent=False)
            else:
                setattr(self, name, default if setting is None else setting)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.torch_seed(seed, "frontend"))
            self.patches = nn.Linear(patch_values, width)
            self.cls = nn.Parameter(torch.randn(width) * _STD)
            self.positions = nn.Parameter(torch.randn(num_places + 1, width) * _STD) if config.positions else None
            nn.init.normal_(self.patches.weight, std=_STD)
            nn.init.zeros_(self.patches.bias)

    def forward(self, batch: PatchBatch) -> Tensor:
        """Hidden states `(T, W)` of the clips' tokens."""
        values = batch.values.to(self.cls.dtype)
        if batch.values.dtype == torch.uint8:
            values = values / 255
        states = self.patches((values - self.mean) / self.std)
        states = torch.where((batch.places == 0)[:, None], self.cls.to(states.dtype), states)
        return states if self.positions is None else states + self.positions[batch.places]


def load_vit(frontend: Frontend) -> None:
    """Copies the embeddings of the ViT that the settings name."""
    from transformers import AutoConfig, PretrainedConfig, ViTModel

    config, setting = frontend.config, f"frontend.pretrained = {frontend.config.pretrained}"
    assert config.pretrained is not None
    folder = expand(config.pretrained)
    source = str(folder) if folder.is_dir() else config.pretrained
    with hub_or_cache(), silence():
        if folder.is_dir():
            check_folder(folder)
        check_config(settings := PretrainedConfig.get_config_dict(source)[0])
        check_code("config.json", settings, "use a ViT without code of its own")
        vit_config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if vit_config.model_type != "vit":
            raise EncoderError(f"{setting}: is of type {vit_config.model_type}, not vit; name a ViT")
        sizes = (frontend.cls.shape[0], config.patch_size[0], config.image_size, 3)
        for name, value in zip(("hidden_size", "patch_size", "image_size", "num_channels"), sizes, strict=True):
            own = getattr(vit_config, name)
            own = own[0] if isinstance(own, (list, tuple)) else own
            if own != value:
                remedy = "use a ViT as wide as the encoder" if name == "hidden_size" else f"set the frontend's to {own}"
                raise EncoderError(f"{setting}: its {name} is {own}, and this run needs {value}; {remedy}")
        model, info = ViTModel.from_pretrained(
            source, add_pooling_layer=False, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
        )
    if missing := sorted(name for name in info["missing_keys"] if name.startswith("embeddings.")):
        raise EncoderError(f"{setting}: its files lack {', '.join(missing)}")
    embeddings = model.embeddings
    with torch.no_grad():
        frontend.patches.weight.copy_(embeddings.patch_embeddings.projection.weight.flatten(1))
        frontend.patches.bias.copy_(embeddings.patch_embeddings.projection.bias)
        frontend.cls.copy_(embeddings.cls_token[0, 0])
        if frontend.positions is not None:
            frontend.positions.copy_(embeddings.position_embeddings[0])


class EmbeddingSwitch:
    """Lets an encoder read hidden states in place of token ids; its layers follow unchanged.

    Word, position and type embeddings, and the norm and dropout behind them, are skipped; the model changes.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self._kind = str(model.config.model_type)
        self._module = getattr(model.base_model, "embeddings", None)
        self._states: Tensor | None = None
        self._used = self._module is None  # a family without such a module reads `inputs_embeds` unchanged
        if self._module is not None:
            self._inner = self._module.forward
            self._module.forward = self._forward

    def _forward(self, *arguments: Any, **keywords: Any) -> Any:
        if self._states is None:
            return self._inner(*arguments, **keywords)
        self._used = True
        return self._states

    @contextmanager
    def reading(self, states: Tensor) -> Iterator[None]:
        """Makes the encoder read `states` while the block runs."""
        self._states = states
        try:
            yield
        finally:
            self._states = None
        if not self._used:
            raise EncoderError(f"model type {self._kind} cannot read patches: it has no module for its embeddings")


def embedding_width(model: "PreTrainedModel") -> int:
    """W: size of the hidden states behind the encoder's embeddings, which may be smaller than its hidden size."""
    module = getattr(model.base_model, "embeddings", None)
    size = getattr(model.config, "embedding_size", None)
    return int(size if size is not None and module is not None else model.config.hidden_size)
