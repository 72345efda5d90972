"""Settings that cannot be, alone or together: the message names them; which settings change the hash of a run."""

import pytest
import tinyruns as runs
from messages import all_of, says
from pydantic import ValidationError

from declutr.trainer.data.packing import MaskingConfig
from declutr.trainer.metrics.config import WandbConfig
from declutr.trainer.model.config import EncoderConfig, FrontendConfig
from declutr.trainer.objectives.config import MatryoshkaConfig, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.supcon.config import SupconConfig
from declutr.trainer.objectives.text_config import SimcseConfig
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.step.config import OptimConfig

BY_NAME = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}
CHUNK = "deterministic_chunk_documents"
COMPILED = {"from_config": {"model_type": "roberta"}, "compile": True}
ELASTIC = {"elastic_determinism": True}
LOSSES, QUEUE = ("NTXentLoss", "SupConLoss"), "queue_size = 8"
ALIKE = [32, "all"]
SIZES = {"sizes": [3, "all"]}
ENCODERS = {"num_trainable_layers": 2, "new_mlm_head": True, "prompt": "passage: "}
OPTIMIZERS = ({"schedule": "linear"}, {"schedule": "constant", "warmup_ratio": 0.1}, {"max_grad_norm": None})
REFUSED = [
    (DeclutrConfig, {"queue_size": 8, "loss": BY_NAME}, (QUEUE, "ntxent", "pytorch_metric_learning")),
    (
        DeclutrConfig,
        {"queue_size": 8, "loss": {"exclude_same_document": True}},
        (QUEUE, "loss.exclude_same_document = true"),
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
    (SpanConfig, {"query_tokens": [2, 8]}, "query_tokens"),
    (SpanConfig, {"query_share": 0.5, "query_tokens": [8, 2]}, "query_tokens"),
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
    (ScalingConfig, {CHUNK: 3}, (f"{CHUNK} = 3", "no effect", "elastic_determinism = true")),
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
    (MatryoshkaConfig, {"sizes": [32, 0, "all"]}, ("sizes", "0", "from 1")),
    (MatryoshkaConfig, {"sizes": [32, -4, 2.5, True, "32", "all"]}, ("sizes", "-4", "2.5", "True", "'32'")),
    (MatryoshkaConfig, {"sizes": [32, "all", 32]}, ("32", "twice")),
    (MatryoshkaConfig, {"sizes": []}, ("sizes", "list")),
    (MatryoshkaConfig, {"sizes": 64}, ("sizes", "list")),
    (MatryoshkaConfig, {"sizes": ALIKE, "weights": [1.0]}, ("weights", "2 sizes", "not 1")),
    (MatryoshkaConfig, {"sizes": ALIKE, "weights": [1.0, -0.5]}, ("weights", "from 0")),
    (MatryoshkaConfig, {"sizes": ALIKE, "weights": [0, 0]}, ("weights", "above 0")),
    (MatryoshkaConfig, {"sizes": ALIKE, "weights": [1, float("nan")]}, ("weights.1", "finite")),
]


@pytest.mark.parametrize(("section", "settings", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_by_name(section, settings, message):
    with pytest.raises(ValidationError) as error:
        section(**settings)
    problems = error.value.errors()
    assert len({problem["loc"][:1] for problem in problems}) == 1
    says([f"{'.'.join(map(str, problem['loc']))} {problem['msg']}" for problem in problems], message)


def test_defaults_survive_a_round_of_their_settings_and_loggers_are_off():
    for config in (SupconConfig(reference_supcon=True), SpanConfig()):
        assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert WandbConfig().mode == "disabled"


def hash_of(**changes):
    return runs.least_config(**changes).hash()


def test_settings_that_change_the_result_change_the_hash_and_no_others():
    base, wandb = {"encoder": {"pretrained": "x"}, "export": "best"}, {"mode": "online", "base_url": "https://x.org"}
    plain = hash_of(**base)
    for unchanged in (
        {"on_nonfinite_loss": "skip"},
        {"metrics": {"wandb": wandb | {"project": "p"}}},
        {"scaling": ELASTIC},
        {"validation": {"patience": 3}},
    ):
        assert hash_of(**base | unchanged) == plain
    for changed in (
        {"precision": "bf16"},
        *({"encoder": {"pretrained": "x", name: value}} for name, value in ENCODERS.items()),
        *({"optim": changes} for changes in OPTIMIZERS),
        *({"validation": {name: value}} for name, value in {"stsb": "sts", "data": "other", "score": "mrr"}.items()),
        {"objective": {"reference_rank_scaling": 4}},
        {"spans": {"query_share": 0.5}},
    ):
        assert hash_of(**base | changed) != plain


def test_a_run_of_an_earlier_version_goes_on():
    """The hashes of cb156041: a setting that came later, and changes nothing as it is, is in none."""
    values = {"encoder": {"from_config": {"model_type": "roberta", "hidden_size": 16}}, "steps": 5}
    supervised = {"kind": "simcse", "supervised": True}
    assert hash_of(**values, objective={"kind": "declutr"}).startswith("981f4017c164a4c4")
    assert hash_of(**values, objective={"kind": "simcse"}).startswith("51c085ee1249102a")
    assert hash_of(**values, objective=supervised).startswith("cc32e74c3e6c9b3d")
    assert not hash_of(**values, objective=supervised | {"hard_negatives": False}).startswith("cc32e74c3e6c9b3d")


def test_an_objective_without_scores_chooses_nothing(monkeypatch):
    monkeypatch.setattr(DeclutrConfig, "scores", ())
    plain = runs.least_config(export="last")
    assert plain.validation.score == ""
    assert plain.resume_settings()["validation"]["score"] == "followed", "the hash of every such run has it"
    with pytest.raises(ValueError, match=all_of("export = best", "has none", "validation.stsb")):
        runs.least_config(export="best")


def several(*folders, weights):
    return [{"path": folder, "weight": weight} for folder, weight in zip(folders, weights, strict=True)]


def test_weights_of_corpora_decide_the_result_and_places_do_not():
    hashes = [hash_of(data=several("a", "b", weights=w)) for w in ([1, 1], [0.5, 0.5], [1, 2])]
    assert hashes[0] == hashes[1] == hash_of(data=several("c", "d", weights=[1, 1]))
    assert len({*hashes, hash_of(data="a")}) == 3
    tasks = [{"more": {"data": several("a", "b", weights=w)}} for w in ([1, 1], [1, 2])]
    assert len({hash_of(auxiliary_tasks=task) for task in tasks}) == 2
    single = runs.least_config(data=several("a", weights=[5]))
    assert (single.data, single.hash()) == ("a", hash_of(data="a"))
