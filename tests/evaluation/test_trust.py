"""Folders from someone else: what they say of themselves never runs their code, whatever command reads them."""

import json
import shutil
import sys

import pytest
import tinyruns as runs
import torch
import yaml
from encoderfiles import keys
from folders import embed_rows, encoder_folder
from messages import all_of
from sentevaldata import write_sets
from serving import Handler, serving
from tinyruns import state_of

from declutr.cli.main import main
from declutr.common.config import load_config
from declutr.common.errors import ConfigError, EncoderError
from declutr.encoders.loading import load_encoder
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import ENCODER
from declutr.trainer.config import TrainConfig

CODE = """
from pathlib import Path
from transformers import RobertaConfig, RobertaModel, RobertaForMaskedLM, PreTrainedTokenizerFast
Path({marker!r}).write_text("it ran")
class TheirConfig(RobertaConfig):
    model_type = "theirs"
class TheirModel(RobertaModel):
    config_class = TheirConfig
class TheirMaskedModel(RobertaForMaskedLM):
    config_class = TheirConfig
class TheirTokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {
    "AutoConfig": "theirs.TheirConfig", "AutoModel": "theirs.TheirModel",
    "AutoModelForMaskedLM": "theirs.TheirMaskedModel",
}  # fmt: skip


@pytest.fixture
def marker(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    yield tmp_path / "marker"
    _forget()


def _forget():
    """Their modules are imported again by the next command."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture
def theirs(tmp_path, marker):
    """An encoder whose configuration names classes in a Python file beside it."""
    folder = encoder_folder(tmp_path / "theirs")
    (folder / "theirs.py").write_text(CODE.format(marker=str(marker)))
    keys("config.json", model_type="theirs", auto_map=CLASSES)(folder)
    return folder


@pytest.fixture
def their_index(tmp_path, theirs):
    """An index that says: made with that encoder, which is to be trusted."""
    output = embed_rows(tmp_path, ["ab cd", "ef gh"])
    assert main(["index", str(output), "--output", str(tmp_path / "index")]) == 0
    choose(tmp_path / "index", model=str(theirs), trust_remote_code=True)
    return tmp_path / "index"


def choose(index, **choice):
    keys("index.json", choice=json.loads((index / "index.json").read_text())["choice"] | choice)(index)


def settle(run, **changes):
    """Changes settings of the run; returns those before."""
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(values | changes))
    return values


@pytest.fixture
def their_run(tmp_path, theirs):
    """A run whose settings say the same; its checkpoint has no weights, and its code would run before that is seen."""
    run, data = tmp_path / "run", tmp_path / "data"
    checkpoint.save(run / "checkpoints", state_of(1), {ENCODER: {"x": torch.zeros(1)}})
    (data / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(theirs / name, data / "tokenizer")
    (run / "config.yaml").write_text(yaml.safe_dump(runs.train_values(data, run)))
    settle(run, encoder={"pretrained": str(theirs), "trust_remote_code": True})
    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", ["search", "embed", "export", "evaluate", "mteb"])
def test_only_the_command_line_grants_trust(command, their_index, their_run, theirs, marker, tmp_path, refused):
    texts, scores = str(tmp_path / "in"), ["--output", str(tmp_path / "scores")]
    sets = ["--data", str(tmp_path / "sets"), *scores, "--tasks", "STS12", "--allow-unchecked"]
    table = ["--to", "static", "--corpus", texts]  # of too few tokens, which is seen after loading
    folders = (str(theirs), str(their_run))
    commands = {
        "search": [["search", str(their_index), "ab"]],
        "embed": [["embed", folder, texts, "--output", str(tmp_path / "o.npy")] for folder in folders],
        "export": [["export", folder, *table, "--output", f"{folder}-table"] for folder in folders],
        "mteb": [["evaluate", str(theirs), "--mteb", "STSBenchmark", *scores]],
        "evaluate": [["evaluate", folder, *sets] for folder in folders],
    }
    if command == "mteb":
        pytest.importorskip("mteb", reason="pip install -e '.[mteb]'")
    if command == "evaluate":
        write_sets(tmp_path / "sets", rows=16)
    for arguments in commands[command]:
        refused(arguments, "trust", "--trust-remote-code")
        assert not marker.exists(), arguments
        main([*arguments, "--trust-remote-code"])
        assert marker.exists(), arguments
        marker.unlink()
        _forget()


def test_shards_bring_no_code(theirs, marker, tmp_path):
    """A tokenizer folder that names a class of its own; nobody is asked whether to run it either."""
    from declutr.trainer.build import load_tokenizer

    (tmp_path / "data").mkdir()
    shutil.copytree(theirs, tmp_path / "data/tokenizer")
    config = {"tokenizer_class": "TheirTokenizer", "auto_map": {"AutoTokenizer": ["theirs.TheirTokenizer", None]}}
    (tmp_path / "data/tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(tmp_path / "data")
    assert not marker.exists()


TRAIN = "train: {run: r, data: d, encoder: {pretrained: m, trust_remote_code: %s}}"
PREPARE = "prepare: {output: o, corpus: {kind: files, paths: [p]}, geometry: {num_anchors: 1, max_tokens: 8},"
PREPARE += " tokenizer: {kind: pretrained, name: n, trust_remote_code: %s}}"


@pytest.mark.parametrize(("text", "model"), [(TRAIN, TrainConfig), (PREPARE, PipelineConfig)])
def test_a_file_of_settings_grants_no_trust(tmp_path, text, model):
    part = "encoder" if model is TrainConfig else "tokenizer"
    path, key = tmp_path / "c.yaml", f"{part}.trust_remote_code"

    def trusted(value, *words):
        path.write_text(text % value)
        return getattr(load_config(str(path), text.partition(":")[0], model, words), part).trust_remote_code

    for value in ("true", "1", "'yes'", "null"):
        with pytest.raises(ConfigError, match=all_of(f"{key} = true", "grant trust")):
            trusted(value)
        assert trusted(value, f"{key}=true")
        assert not trusted(value, f"{key}=false")
    assert not trusted("false")


@pytest.fixture
def host():
    """A host on this machine that ends every connection; yields its address and the list of connections."""
    calls = []

    class Silent(Handler):
        def handle(self):
            calls.append(self.client_address)

    with serving(Silent) as address:
        yield f"http://{address}", calls


@pytest.mark.parametrize(
    "data", ["s3://bucket/x?endpoint_override=HOST", "HOST/x", "github://a:b@/x", "simplecache::file:///etc"]
)
def test_no_address_that_a_run_names_is_opened(their_run, tmp_path, host, data):
    address, calls = host
    before = settle(their_run, data=data.replace("HOST", address), cache=str(tmp_path / "chosen"))
    with pytest.raises(EncoderError, match=all_of("No address", "opened")):
        load_encoder(str(their_run))
    shutil.copytree(f"{before['data']}/tokenizer", their_run / "tokenizer")
    with pytest.raises(EncoderError, match="trust that code"):  # the run's copy of the tokenizer is read
        load_encoder(str(their_run))
    assert not calls
    assert not (tmp_path / "chosen").exists()


def test_the_hub_is_not_asked_for_a_name_in_a_received_folder(their_run, their_index, host, monkeypatch, refused):
    address, calls = host
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    settle(their_run, encoder={"pretrained": "someone/model"})
    with pytest.raises(EncoderError, match=all_of("trust", "hf download someone/model")):
        load_encoder(str(their_run))
    choose(their_index, model="/nowhere/moved")
    refused(["search", their_index, "ab"], "add --model FOLDER", "/nowhere/moved cannot be loaded", "no such folder")
    choose(their_index, model="someone/model")
    refused(["search", their_index, "ab"], "trust", "--model someone/model")
    assert not calls
    assert main(["search", str(their_index), "ab", "--model", "someone/model"]) == 1
    assert calls, "a name that the user typed is asked for"
