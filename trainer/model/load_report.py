"""Loading of pretrained encoders: the weights that their files and the model do not share, and silence otherwise."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from declutr.common.console.terminal import excerpt

# Heads and buffers in many published files that no masked language model has or needs.
_HARMLESS = (
    "pooler.",
    "seq_relationship.",
    "sop_classifier.",
    "position_ids",
    "lm_loss.",
    "discriminator_predictions.",
)
_NAMED = 6  # names in one message; further ones are counted


@dataclass(frozen=True)
class LoadReport:
    """Weights that were not loaded; none for an encoder from scratch.

    Attributes:
        encoder: weights of the encoder that are missing in the files or have another shape; their values are random.
        head: weights of the MLM head for which the same holds.
        unused: weights in the files that the model does not have, without those known to be harmless.
    """

    encoder: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @staticmethod
    def of(model: Any, info: dict[str, Any]) -> "LoadReport":
        """Reads transformers' report about a loaded masked language model.

        Args:
            model: the model.
            info: `missing_keys`, `mismatched_keys` and `unexpected_keys` of `from_pretrained`.
        """
        missing = {name: name for name in info["missing_keys"] if not _harmless(name)}
        for name, stored, model_shape in info["mismatched_keys"]:
            missing[name] = f"{name} (of shape {list(stored)}, not {list(model_shape)})"
        body = f"{model.base_model_prefix}."
        return LoadReport(
            tuple(missing[name] for name in sorted(missing) if name.startswith(body)),
            tuple(missing[name] for name in sorted(missing) if not name.startswith(body)),
            tuple(sorted(name for name in info["unexpected_keys"] if not _harmless(name))),
        )

    def problems(self, pretrained: str | None, needs_head: bool) -> list[str]:
        """Problems with random weights that should be trained ones, one line each.

        Args:
            pretrained: name or folder of the encoder.
            needs_head: True if the MLM head is trained and `encoder.new_mlm_head` is off.
        """
        name = f"encoder.pretrained = {pretrained}"
        problems = []
        if self.encoder:
            problems.append(
                f"{name}: its files lack weights of the encoder, which would be random: "
                f"{excerpt(self.encoder, _NAMED)}. The files are incomplete, or config.json belongs to another "
                "encoder; fetch it again"
            )
        if self.head and needs_head:
            problems.append(
                f"{name}: has no MLM head, and the MLM loss would use random weights: "
                f"{excerpt(self.head, _NAMED)}. Train without MLM, or start with a new "
                "head (encoder.new_mlm_head=true)"
            )
        return problems

    def remark(self, pretrained: str | None) -> str | None:
        """A message about unused weights, or None."""
        if not self.unused:
            return None
        return f"encoder.pretrained = {pretrained}: unused weights: {excerpt(self.unused, _NAMED)}"


def _harmless(name: str) -> bool:
    return any(part in name for part in _HARMLESS)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Mutes transformers' log below errors and its progress bars, and restores both afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
