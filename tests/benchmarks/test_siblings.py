"""`benchmarks.quality.siblings`: a whole call on a tiny corpus, its second call, its inputs and its tables."""

import json
import random

import pytest
from folders import encoder_folder
from messages import all_of
from transformers import AutoModel, BertConfig, BertModel

from benchmarks.quality import sibling_inputs, sibling_runs, siblings
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.setup.config import TrainConfig

WORDS = [f"word{number}" for number in range(120)]


def sentence(rng, size):
    return " ".join(rng.choices(WORDS, k=size))


@pytest.fixture
def data(tmp_path):
    """The folders of the shared data, tiny."""
    rng = random.Random(0)
    folder = tmp_path / "data"
    stsb = folder / "senteval/downstream/STS/STSBenchmark"
    for path in (folder / "corpus", folder / "wiki", folder / "nli", stsb):
        path.mkdir(parents=True)
    lines = [json.dumps({"text": sentence(rng, 400)}) for _ in range(150)]
    (folder / "corpus/some.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "wiki/wiki_sentences_xprobe_en.txt").write_text("".join(f"{sentence(rng, 9)}\n" for _ in range(100)))
    for name in ("snli_dev", "cad_nli_train"):
        pairs = [
            {"premise": premise, "hypothesis": sentence(rng, 5), "label": label}
            for premise in (sentence(rng, 8) for _ in range(60))
            for label in ("entailment", "neutral", "contradiction")
        ]
        (folder / f"nli/{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    rows = [f"main\tfile\tyear\t{n}\t{n % 6}.0\t{sentence(rng, 6)}\t{sentence(rng, 6)}\n" for n in range(40)]
    (stsb / "sts-dev.csv").write_text("".join(rows))
    return folder


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_siblings_run_of_one_method_writes_its_scores(data, tmp_path):
    """From the lower layer of an encoder; the second call repeats nothing and gives the same scores."""
    tokenizer = train_tokenizer([" ".join(WORDS)], 300)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **shape, **ids)
    BertModel(config).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(str(tmp_path / "start"))
    start = ["--start", str(tmp_path / "start"), "--start-layers", "1"]
    short = ["--methods", "scl-0.3", "--seeds", "1", "--steps", "2"]
    where = ["--data", str(data), "--work", str(tmp_path / "work"), "--json", str(tmp_path / "figures.json")]
    siblings.main([*where, *start, *short])
    first = json.loads((tmp_path / "figures.json").read_text())
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "work/start-1layers").glob("*.log")}
    assert {path.name for path in logs} == {"prepare-pairs.log", "prepare-pairs-dev.log", "scl-0.3-0.log"}
    siblings.main([*where, *start, *short])
    assert json.loads((tmp_path / "figures.json").read_text())["runs"] == first["runs"]
    assert {path: path.stat().st_mtime_ns for path in logs} == logs
    (run,) = first["runs"]
    names = {"stsb_dev", "uniformity", "alignment", "recall_at_1"}
    assert (run["method"], run["seed"], run["start"], run["steps"]) == ("scl-0.3", 0, "start-1layers", 2)
    assert run.keys() >= names
    assert run["start_scores"].keys() == names
    assert run["start_scores"] == first["start"]["scores"]
    assert list(run["stsb_by_step"]) == ["0", "2"]


@pytest.mark.parametrize("own", [True, False])
def test_siblings_settings_are_valid(tmp_path, own):
    """Those of every method, of the start and of all shards; runs differ in their method and seed alone."""
    tokenizer = None if own else tmp_path
    for name, settings in sibling_runs.prepare_settings(tmp_path, tmp_path, tokenizer).items():
        assert PipelineConfig.model_validate(settings).output.endswith(name)
    assert TrainConfig.model_validate(sibling_runs.start_settings(tmp_path, tmp_path, 5)).objective.mlm
    for name, method in sibling_runs.METHODS.items():
        settings = sibling_runs.run_settings(name, 3, tmp_path, tmp_path, tmp_path, 500, 1e-4, own)
        config = TrainConfig.model_validate(settings)
        assert config.objective.kind == method.objective["kind"]
        assert config.objective.mlm == (own and method.objective["kind"] == "declutr")
        assert list(config.auxiliary_tasks) == ([method.auxiliary] if method.auxiliary else [])
        assert (config.seed, config.steps, config.optim.lr, config.encoder.pooling) == (3, 500, 1e-4, "mean")


def test_scores_of_a_run_are_those_of_its_encoder(tmp_path):
    """Its own validation scores other rows."""
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 4, "seconds": 1.0, "last_scores": {"alignment": 9.0}}))
    (tmp_path / "metrics.jsonl").write_text("")
    pairs = {"stsb_dev": 49.9, "alignment": 1.0, "uniformity": -1.0, "recall_at_1": 0.1}
    start = {"stsb_dev": 1.0, "alignment": 2.0, "uniformity": 3.0, "recall_at_1": 0.4}
    found = siblings.scores_of_run(tmp_path, pairs, start)
    assert {name: found[name] for name in pairs} == pairs
    assert found["start_scores"] == start


def test_no_premise_is_trained_and_scored(tmp_path):
    source, folder = tmp_path / "nli", tmp_path / "work"
    source.mkdir()
    for name, premises in {"snli_dev": range(700), "cad_nli_train": range(650, 900)}.items():
        spelling = "A man {} ." if name == "snli_dev" else "a man {}."
        pairs = [
            {"premise": spelling.format(n), "hypothesis": f"{name} {label}", "label": label}
            for n in premises
            for label in ("entailment", "contradiction")
        ]
        (source / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    sibling_inputs.split_nli(source, folder)
    read = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "dev")
    }
    keys = {name: {sibling_inputs._key(pair) for pair in pairs} for name, pairs in read.items()}
    assert (len(keys["dev"]), len(read["dev"])) == (500, 1000)
    assert not keys["dev"] & keys["train"]
    assert len(keys["train"]) == 400
    before = (folder / "dev.jsonl").stat().st_mtime_ns
    sibling_inputs.split_nli(source, folder)
    assert (folder / "dev.jsonl").stat().st_mtime_ns == before


def test_lower_layers_are_those_of_the_source(tmp_path):
    (tmp_path / "source").mkdir()
    source = encoder_folder(tmp_path / "source", "bert")
    sibling_inputs.keep_lower_layers(source, 1, tmp_path / "one")
    whole, cut = AutoModel.from_pretrained(source), AutoModel.from_pretrained(tmp_path / "one")
    assert cut.config.num_hidden_layers == len(cut.encoder.layer) == 1
    theirs = whole.state_dict()
    assert all(value.equal(theirs[name]) for name, value in cut.state_dict().items())
    with pytest.raises(SystemExit, match=all_of("--start-layers 9", "2 layers")):
        sibling_inputs.keep_lower_layers(source, 9, tmp_path / "nine")


def test_siblings_table_has_means_and_differences():
    def run(method, seed, stsb):
        return {"method": method, "seed": seed, "stsb_dev": stsb, "recall_at_1": 0.5, "alignment": 1, "uniformity": -2}

    scores = [run("simcse-unsup", 0, 40.0), run("simcse-unsup", 1, 50.0), run("simcse-sup", 0, 44.0)]
    scores += [run("simcse-sup", 1, 52.0)]
    start = {"name": "own", "scores": dict.fromkeys(siblings._SCORES, 1.0)}
    lines = list(siblings.table({"steps": 7, "runs": scores, "start": start}))
    assert lines[2] == "| start: own | 1.0 | 100.0 | 1.000 | 1.000 |"
    assert lines[3] == "| simcse-unsup | 45.0 ± 7.1 | 50.0 ± 0.0 | 1.000 ± 0.000 | -2.000 ± 0.000 |"
    assert lines[-1] == "| simcse-sup over simcse-unsup | +3.0 ± 1.4 | +0.0 ± 0.0 |"


def test_arms_differ_in_one_weight():
    methods = sibling_runs.METHODS
    for arm, weight in (("scd-repulsion", "decorrelation_weight"), ("scd-decorrelation", "repulsion_weight")):
        found, both = methods[arm].objective, methods["scd"].objective
        assert {**found, weight: None} == {**both, weight: None}
        assert found[weight] == 0
