import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from messages import says

from declutr.common.config import load_config
from declutr.common.errors import ConfigError
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys, identity
from declutr.pipeline.job.path_checks import output_place_problems
from declutr.pipeline.job.sample import sample_texts
from declutr.pipeline.job.units import fit_units, plan_units
from declutr.pipeline.prepare import main, problems


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(f"document number {number} " * 20 for number in range(30)))
    return path


@pytest.fixture
def write_config(tmp_path, make_config):
    def write(*paths, **changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"prepare": make_config(*paths, **changes).model_dump(mode="json")}))
        return str(path)

    return write


@pytest.mark.parametrize("name", ["demo.yaml", "openwebtext.yaml"])
def test_our_configs_are_valid(name):
    load_config(f"configs/{name}", "prepare", PipelineConfig)


def test_every_wrong_key_and_value_is_reported_at_once(write_config, corpus):
    overrides = ["geometry.max_token=3", "validation_fraction=1", "tokenizer.vocab_size=10", "corpus.format=xml"]
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(corpus), "prepare", PipelineConfig, overrides)
    assert len(caught.value.problems) == 4
    text = str(caught.value)
    says(text, "`geometry.max_tokens`")
    for key in ("validation_fraction", "vocab_size", "format"):
        assert key in text


def test_missing_inputs_tokenizer_and_a_foreign_output_are_reported_together(
    tmp_path, make_config, corpus, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = {"kind": "pretrained", "name": str(tmp_path / "no-tokenizer")}
    found = problems(make_config(tmp_path / "no-1.txt", tmp_path / "no-2.jsonl", corpus, tokenizer=missing))
    assert len(found) == 3
    for name, problem in zip(("no-1.txt", "no-2.jsonl", "no-tokenizer"), found, strict=True):
        assert name in problem
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.doc").write_text("years of work")
    (problem,) = problems(make_config(corpus))
    says(problem, "`prepare`", "files")


def test_a_problem_ends_the_command_with_its_message_and_nothing_written(write_config, tmp_path, capsys):
    assert main([write_config(tmp_path / "no.txt")]) == 1
    assert "no.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("declutr.pipeline.prepare, declutr.pipeline.job.worker", "torch"),
        ("declutr.trainer.train, declutr.trainer.driver.run", "transformers"),
    ],
    ids=["data half without torch", "continuing without transformers"],
)
def test_command_imports_no_library_that_it_does_not_need(modules, heavy):
    code = f"import sys, {modules}; sys.exit({heavy!r} in sys.modules)"
    root = str(Path(__file__).resolve().parents[2])
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}).returncode == 0


def test_print_config_shows_the_resolved_settings(write_config, corpus, capsys):
    assert main([write_config(corpus), "seed=7", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["seed"] == 7
    meaning = " ".join(line.removeprefix("# ") for line in shown.partition("\noutput: ")[0].splitlines())
    assert meaning.endswith(" ".join(str(PipelineConfig.model_fields["output"].description).split()))


def test_the_hash_is_of_what_decides_the_shards(make_config, corpus):
    config = make_config(corpus)
    assert config_hash(make_config(corpus, output="elsewhere", session={"num_cpus": 2})) == config_hash(config)
    other = make_config(corpus, seed=1, geometry={"num_anchors": 2, "max_tokens": 16})
    assert config_hash(other) != config_hash(config)
    left_out = config.model_copy(update={"corpus": config.corpus.model_copy(update={"exclude": ["*.md"]})})
    assert config_hash(left_out) != config_hash(config)
    anchors, seed = differing_keys(other, identity(config))
    says(anchors, "geometry.num_anchors", "here 2", "there 1")
    says(seed, "seed", "here 1", "there 0")


def test_unit_size_grows_only_with_a_corpus_of_too_many_units(make_config, corpus):
    config = make_config(corpus)
    assert config.unit_mib is None
    assert config_hash(config) == config_hash(config.model_copy(update={"unit_mib": 32.0})), "shards keep their bytes"
    many, _ = plan_units(config.corpus, 0.0004)
    for given, most, size, number in (
        (None, len(many), 0.0004, len(many)),
        (None, len(many) - 1, 1.0, 1),  # whole MiB
        (0.0004, 3, 0.0004, len(many)),
    ):
        mib, units, found = fit_units(config.corpus, given, least_mib=0.0004, most_units=most)
        assert (mib, len(units), found) == (size, number, [])
    assert fit_units(config.corpus, None)[1] == plan_units(config.corpus, 32.0)[0]


def test_units_depend_on_the_inputs_and_the_sample_is_even_over_them(make_config, corpus):
    config = make_config(corpus, unit_mib=0.002)
    units, _ = plan_units(config.corpus, config.unit_mib)
    assert [unit.name for unit in units] == [f"{number:05d}" for number in range(len(units))]
    assert sum(unit.num_bytes for unit in units) == corpus.stat().st_size
    assert len(units) > 4
    sample = list(sample_texts(config, units, 0.004))
    assert sample == list(sample_texts(config, units, 0.004))
    assert 4000 < sum(map(len, sample)) < 4000 + 500 * len(units)
    assert len(set(sample)) == len(sample) >= len(units)
    assert len(list(sample_texts(config, units, 100))) == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("s3://bucket", ("folder", "bucket")),
        ("s3://", ("folder", "bucket")),
        ("s3://key:secret@bucket/x", "credentials"),
        ("s3://bucket/x?endpoint_override=http://127.0.0.1:1", ("nothing can be", "answered")),
        ("nothing://bucket/x", ("nothing can be", "Protocol not known")),
        ("http://127.0.0.1:1/x", "nothing can be"),
    ],
)
def test_an_address_that_cannot_take_the_shards_is_found_before_any_work(make_config, corpus, output, words):
    found = problems(make_config(corpus, output=output, storage_retry_seconds=0))
    says(found, words)


def test_an_address_inside_an_input_is_refused():
    (found,) = output_place_problems("s3://bucket/in/out/?region=x", ["s3://bucket/in/", "s3://bucket/i", "here"])
    says(found, "input 's3://bucket/in/'")
