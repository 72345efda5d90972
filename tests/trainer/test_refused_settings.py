"""Settings of encoders, objectives, loggers and workers that cannot be, alone or together: the message names them."""

import pytest
import tinyruns as runs
from messages import all_of
from pydantic import ValidationError

from declutr.trainer.data.packing import MaskingConfig
from declutr.trainer.metrics.config import WandbConfig
from declutr.trainer.model.config import EncoderConfig, FrontendConfig
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.step.config import OptimConfig

BY_NAME = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}
COMPILED = {"from_config": {"model_type": "roberta"}, "compile": True}
ELASTIC = {"elastic_determinism": True}
LOSSES = ("NTXentLoss", "SupConLoss")
SIZES = {"sizes": [3, "all"]}
REFUSED = [
    (DeclutrConfig, {"queue_size": 8, "loss": BY_NAME}, ("queue_size = 8", "ntxent", "pytorch_metric_learning")),
    (
        DeclutrConfig,
        {"queue_size": 8, "loss": {"exclude_same_document": True}},
        ("queue_size = 8", "loss.exclude_same_document = true"),
    ),
    *(
        (DeclutrConfig, {"loss": BY_NAME | {"loss": name}}, (f"'{name}'", *LOSSES))
        for name in ("NtXentLoss", "_private", "os", "__builtins__")
    ),
    (DeclutrConfig, {"loss": BY_NAME | {"miner": "Miner"}}, ("'Miner'", "MultiSimilarityMiner")),
    (DeclutrConfig, {"loss": BY_NAME | {"kind": "triplet"}}, "'ntxent', 'pytorch_metric_learning'"),
    (DeclutrConfig, {"terms": "mlm", "matryoshka": SIZES}, "only MLM is trained"),
    (SupconConfig, {"reference_supcon": True, "base_temperature": 0.5}, "base_temperature"),
    (SimcseConfig, {"equal_views": True, "supervised": True}, "equal_views = true needs supervised = false"),
    (
        MaskingConfig,
        {"mask_replace_prob": 0.95},
        ("mask_replace_prob = 0.95", "random_replace_prob = 0.1", "at most 1", "lower"),
    ),
    (OptimConfig, {"warmup_ratio": 0.1}, ("no effect", "schedule = slanted_triangular")),
    (OptimConfig, {"schedule": "linear", "cut_fraction": 0.2}, ("no effect", "schedule = linear")),
    (OptimConfig, {"schedule": "cosine", "ratio": 8}, ("no effect", "schedule = cosine")),
    (OptimConfig, {"schedule": "triangular"}, "slanted_triangular"),
    (OptimConfig, {"max_grad_norm": 0}, "greater than 0"),
    (SpanConfig, {"min_distance_tokens": 8}, ("min_distance_tokens = 8", "strategy = distant", "all")),
    (SpanConfig, {"min_tokens": 9, "max_tokens": 8}, ("min_tokens = 9", "at most", "max_tokens = 8")),
    *((SpanConfig, {"anchor_beta": wrong}, "anchor_beta.0") for wrong in ((0, 2), (2.5, 2))),
    *((SpanConfig, {"anchor_beta": wrong}, "anchor_beta.1") for wrong in ((4, 33), (4,))),
    (EncoderConfig, {}, ("exactly one", "`pretrained`")),
    (EncoderConfig, {"pretrained": "x", "from_config": {"model_type": "bert"}}, ("exactly one", "`pretrained`")),
    (EncoderConfig, {"from_config": {"hidden_size": 8}}, ("from_config", "`model_type`")),
    (WandbConfig, {"mode": "online"}, ("mode = online", "base_url", "https://api.wandb.ai")),
    (WandbConfig, {"mode": "offline", "base_url": "api.wandb.ai"}, "base_url = 'api.wandb.ai'"),
    (WandbConfig, {"base_url": "file:///etc"}, "base_url = 'file:///etc'"),
    (WandbConfig, {"base_url": "https://"}, "base_url = 'https://'"),
    (WandbConfig, {"api_key": "0123456789abcdef"}, "api_key"),
    (WandbConfig, {"project": ""}, "project"),
    *(
        (ScalingConfig, {"num_workers": 0, **of_ray}, "num_workers = 0 trains without Ray")
        for of_ray in ({"address": "auto"}, {"fsdp": True}, {"spot_notices": "aws"})
    ),
    (
        ScalingConfig,
        {"deterministic_chunk_documents": 3},
        ("deterministic_chunk_documents = 3", "no effect", "elastic_determinism = true"),
    ),
    (ScalingConfig, ELASTIC | {"fsdp": True}, ("exclude", "false")),
    (ScalingConfig, ELASTIC | {"deterministic": False}, ("elastic_determinism", "needs deterministic")),
    (ScalingConfig, ELASTIC | {"reduce_dtype": "bf16"}, ("reduce_dtype = bf16", "no effect", "elastic_determinism")),
    (runs.least_config, {"scaling": ELASTIC, "microbatch_tokens": "auto"}, ("microbatch_tokens", "auto")),
    (runs.least_config, {"scaling": ELASTIC | {"num_workers": [1, 17]}}, ("scaling.num_workers = 17", "16")),
    (runs.least_config, {"scaling": ELASTIC, "encoder": COMPILED}, "encoder.compile = false"),
    (FrontendConfig, {"image_size": 100_000, "patch_size": [1, 1]}, "10,000,000,000 patches"),
    (FrontendConfig, {"patch_size": [1_000_000, 1]}, "1,000,000 values"),
    (FrontendConfig, {"patch_size": [0, 8]}, ("both numbers", "at least 1")),
    (FrontendConfig, {"mean": float("nan")}, "finite"),
    (FrontendConfig, {"std": float("inf")}, "finite"),
    (FrontendConfig, {"std": (0.2, 0.0, 0.2)}, "greater than 0"),
    (FrontendConfig, {"mean": (0.4, 0.5)}, "mean.float"),
]


@pytest.mark.parametrize(("section", "settings", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(section, settings, message):
    with pytest.raises(ValidationError, match=all_of(message)):
        section(**settings)


def test_reference_supcon_survives_a_round_of_its_settings():
    config = SupconConfig(reference_supcon=True)
    assert SupconConfig.model_validate(config.model_dump(mode="json")) == config
