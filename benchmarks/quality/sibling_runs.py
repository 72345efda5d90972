"""Settings of the runs that `benchmarks.quality.siblings` compares: data, methods, and the start that all share.

A run differs from another one in its method and seed alone: steps, optimizer, dropout, pooling and the length of texts
are equal. DeCLUTR's 32 documents give 64 anchors, SCL's 21 premises about 64 pairs, the others have 64 rows a step.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MAX_TOKENS = 32
"""Longest text, specials included."""
_SPANS = {"num_anchors": 2, "num_positives": 2, "min_tokens": 8, "max_tokens": MAX_TOKENS - 2}
# The encoder of the small configs.
_FROM_CONFIG = {
    "model_type": "bert",
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 768,
    "max_position_embeddings": 130,
}
_SCALING = {"num_workers": 1, "device": "cpu", "cpus_per_worker": 2}
_NLI = ("entailment", "contradiction")
_SCD = {
    "kind": "scd",
    "dropout_rates": [0.05, 0.15],
    "attention_dropout_rates": [0.0, 0.0],
    "decorrelation_weight": 0.005,
    "off_diagonal_weight": 0.013,
    "projector": [512, 1024],
    "max_tokens": MAX_TOKENS,
}


@dataclass(frozen=True)
class Method:
    """A method and its part of a run.

    Attributes:
        shards: name of its training shards.
        objective: the `objective` section.
        rows: rows of the shards in a step.
        settings: other sections.
        auxiliary: name of the shards of an auxiliary task.
    """

    shards: Literal["documents", "sentences", "pairs"]
    objective: dict[str, Any]
    rows: int = 64
    settings: dict[str, Any] = field(default_factory=dict)
    auxiliary: Literal["images", "sounds"] | None = None


def _scl(share: float) -> Method:
    return Method("pairs", {"kind": "scl", "contrastive_weight": share, "max_tokens": MAX_TOKENS}, rows=21)


_CLIPS = {"objective": {"kind": "supcon"}, "batch_documents": 48}
_FRONTENDS = {
    "images": {"image_size": 32, "patch_size": [8, 8]},
    "sounds": {"patch_size": [16, 16], "mean": -4.0, "std": 4.0},
}
_SIMCSE = {"kind": "simcse", "max_tokens": MAX_TOKENS}


def _declutr(auxiliary: Literal["images"] | None = None) -> Method:
    return Method("documents", {"kind": "declutr"}, rows=32, settings={"spans": _SPANS}, auxiliary=auxiliary)


METHODS = {
    "simcse-unsup": Method("sentences", _SIMCSE),
    "simcse-sup": Method("pairs", {"kind": "simcse", "supervised": True, "max_tokens": MAX_TOKENS}),
    "scd": Method("sentences", _SCD),
    "scd-repulsion": Method("sentences", _SCD | {"decorrelation_weight": 0.0}),
    "scd-decorrelation": Method("sentences", _SCD | {"repulsion_weight": 0.0}),
    "scl-0": _scl(0.0),
    "scl-0.3": _scl(0.3),
    "scl-1": _scl(1.0),
    "declutr": _declutr(),
    "simcse-images": Method("sentences", _SIMCSE, auxiliary="images"),
    "simcse-sounds": Method("sentences", _SIMCSE, auxiliary="sounds"),
    "declutr-images": _declutr("images"),
}
"""The methods in the order of the table. SCD has the arms of its paper's ablation: both terms and each one alone. Those
with images or sounds train an auxiliary task in turns, as VisualCSE and AudioCSE do."""
PAIRS = (
    ("simcse-sup", "simcse-unsup"),
    ("scd", "simcse-unsup"),
    ("scd", "scd-repulsion"),
    ("scd", "scd-decorrelation"),
    ("scl-0.3", "scl-0"),
    ("scl-1", "scl-0"),
    ("declutr", "simcse-unsup"),
    ("simcse-images", "simcse-unsup"),
    ("simcse-sounds", "simcse-unsup"),
    ("declutr-images", "declutr"),
)
"""Methods whose scores are compared seed by seed."""


def prepare_settings(data: Path, work: Path, tokenizer: Path | None) -> dict[str, dict[str, Any]]:
    """The `prepare` sections by name of the shards, in the order in which they can run.

    Args:
        data: folder of the corpora.
        work: folder with `nli/train.jsonl` and `nli/dev.jsonl`; the shards go to `work/shards`.
        tokenizer: folder of the start's tokenizer; None: one is trained on the documents, and the others use it.
    """
    shards = work / "shards"
    used = {"kind": "pretrained", "name": str(tokenizer or shards / "documents" / "tokenizer")}
    trained = used if tokenizer else {"kind": "train", "vocab_size": 8000, "sample_mib": 32}
    geometry = {name: _SPANS[name] for name in ("num_anchors", "max_tokens")}
    inputs: dict[str, tuple[Path, dict[str, Any]]] = {
        "documents": (data / "corpus", {"tokenizer": trained, "geometry": geometry}),
        "sentences": (data / "wiki" / "wiki_sentences_xprobe_en.txt", {"content": "sentences"}),
        "pairs": (work / "nli" / "train.jsonl", {"content": {"kind": "pairs", "required_labels": list(_NLI)}}),
        "pairs-dev": (work / "nli" / "dev.jsonl", {"content": {"kind": "pairs"}}),
    }
    texts = {
        name: {
            "output": str(shards / name),
            "corpus": {"kind": "files", "paths": [str(path)]},
            "tokenizer": used,
            **({"validation_fraction": 0.0} if name.startswith("pairs") else {}),
            **settings,
        }
        for name, (path, settings) in inputs.items()
    }
    clips: dict[str, tuple[Path, dict[str, Any]]] = {
        "images": (data / "images" / "cifar10_small" / "train", {"kind": "images", "shortest_edge": 32}),
        "sounds": (
            data / "audio" / "fsdd",
            {"kind": "audio", "sample_rate": 8000, "num_mel_bins": 64, "label": r"^(\d)_"},
        ),
    }
    return texts | {
        name: {
            "output": str(shards / name),
            "corpus": {"kind": "files", "paths": [str(path)]},
            "content": content,
            "validation_fraction": 0.0,
        }
        for name, (path, content) in clips.items()
    }


def start_settings(work: Path, stsb: Path, steps: int) -> dict[str, Any]:
    """The `train` section of the own start: MLM alone, on spans of documents as long as the texts of the methods.

    DeCLUTR without its contrastive term is MLM alone. SimCSE's MLM would come with a contrast of the same sentences,
    which is what the runs measure.
    """
    return {
        "run": str(work / "mlm"),
        "data": str(work / "shards" / "documents"),
        "encoder": {"from_config": _FROM_CONFIG, "attention_dropout": 0.0},
        "spans": _SPANS,
        "objective": {"kind": "declutr", "terms": "mlm"},
        "optim": {"lr": 1e-3, "schedule": "linear", "warmup_ratio": 0.1, "weight_decay": 0.01},
        "batch_documents": 64,
        "steps": steps,
        "validation": {"every_steps": steps, "stsb": str(stsb)},
        "checkpoint": {"every_steps": min(250, steps)},
        "scaling": _SCALING,
    }


def run_settings(
    name: str, seed: int, work: Path, start: Path, stsb: Path, steps: int, lr: float, own: bool
) -> dict[str, Any]:
    """The `train` section of a run.

    Args:
        name: name of the method.
        seed: seed of order, dropout and new layers.
        work: folder with `shards`.
        start: folder of the encoder to start from.
        stsb: folder of STS-B.
        steps: number of steps.
        lr: largest learning rate.
        own: the start is the own one, with an MLM head. DeCLUTR trains MLM, too, if there is a head.
    """
    method, every = METHODS[name], min(125, steps)
    documents = method.shards == "documents"
    terms = {"terms": "both" if own else "contrastive"} if documents else {}
    # DeCLUTR's validator reads documents; `benchmarks.quality.siblings` scores its encoder on the pairs.
    scored = {} if documents else {"data": str(work / "shards" / "pairs-dev")}
    return {
        "run": str(work / f"{name}-{seed}"),
        "data": str(work / "shards" / method.shards),
        "encoder": {"pretrained": str(start), "pooling": "mean", "attention_dropout": 0.0},
        "objective": method.objective | terms,
        "optim": {"lr": lr, "schedule": "linear", "warmup_ratio": 0.1, "weight_decay": 0.0},
        "batch_documents": method.rows,
        "steps": steps,
        "seed": seed,
        "validation": {"every_steps": every, "max_documents": 500, "stsb": str(stsb), **scored},
        "checkpoint": {"every_steps": every},
        "scaling": _SCALING,
        **method.settings,
        **({} if method.auxiliary is None else _task(method.auxiliary, work)),
    }


def _task(shards: str, work: Path) -> dict[str, Any]:
    """The sections of a run with an auxiliary task on images or sounds."""
    task = {"data": str(work / "shards" / shards), "frontend": _FRONTENDS[shards], **_CLIPS}
    return {"auxiliary_tasks": {shards: task}, "task_schedule": "alternating"}
