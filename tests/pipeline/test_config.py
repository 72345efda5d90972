"""Settings of every kind of content: what is needed, what is refused, and what makes up their identity."""

import json
import sys

import pytest
import yaml
from mediafiles import png, sound, spread, stored, tone
from messages import all_of, says
from PIL import Image
from preparing import values_of
from processes import run_python
from pydantic import ValidationError

from declutr.common.config import load_config
from declutr.common.errors import ConfigError
from declutr.pipeline import config as config_module
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys, identity, output_place_problems
from declutr.pipeline.job.output import sample_texts
from declutr.pipeline.job.units import fit_units, plan_units
from declutr.pipeline.prepare import main, problems
from declutr.pipeline.readers.inputs import find_inputs
from declutr.pipeline.readers.skipped import Skipped


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(f"document number {number} " * 20 for number in range(30)))
    return path


def test_problems_write_nothing_and_print_config_shows_all(
    tmp_path, make_config, write_config, corpus, monkeypatch, capsys
):
    assert main([write_config(make_config(tmp_path / "no.txt"))]) == 1
    assert "no.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([write_config(make_config(corpus)), "seed=7", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert yaml.safe_load(shown)["seed"] == 7
    meaning = " ".join(line.removeprefix("# ") for line in shown.partition("\noutput: ")[0].splitlines())
    assert meaning.endswith(" ".join(str(PipelineConfig.model_fields["output"].description).split()))
    # Missing inputs and a missing tokenizer are reported together.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = {"kind": "pretrained", "name": str(tmp_path / "no-tokenizer")}
    lines = problems(make_config(tmp_path / "no-1.txt", tmp_path / "no-2.jsonl", corpus, tokenizer=missing))
    assert all(name in line for name, line in zip(("no-1.txt", "no-2.jsonl", "no-tokenizer"), lines, strict=True))
    spread(tmp_path / "out", {"thesis.doc": b"years of work"})
    says(*problems(make_config(corpus)), "`prepare`", "files")


def test_the_hash_is_of_what_decides_the_shards(make_config, corpus):
    config = make_config(corpus)
    assert config_hash(make_config(corpus, output="elsewhere", session={"num_cpus": 2})) == config_hash(config)
    other = make_config(corpus, seed=1, geometry={"num_anchors": 2, "max_tokens": 16})
    assert config_hash(other) != config_hash(config)
    left_out = config.model_copy(update={"corpus": config.corpus.model_copy(update={"exclude": ["*.md"]})})
    assert config_hash(left_out) != config_hash(config)
    anchors, seed = differing_keys(identity(other), identity(config))
    says(anchors, "geometry.num_anchors", "here 2", "there 1")
    says(seed, "seed", "here 1", "there 0")
    (gopher,) = differing_keys(identity(config), identity(make_config(corpus, filters={"gopher": {}})))
    says(gopher, "filters.gopher: here None, there {")


def test_unit_size_grows_only_with_a_corpus_of_too_many_units_and_the_sample_is_even_over_units(make_config, corpus):
    config = make_config(corpus)
    assert config.unit_mib is None
    assert config_hash(config) == config_hash(config.model_copy(update={"unit_mib": 32.0})), "shards keep their bytes"
    many, _ = plan_units(config.corpus, 0.0004)
    number = len(many)
    cases = (None, number, 0.0004, number), (None, number - 1, 1.0, 1), (0.0004, 3, 0.0004, number)  # whole MiB
    for setting, max_units, size, number in cases:
        mib, units, unreadable = fit_units(config.corpus, setting, least_mib=0.0004, most_units=max_units)
        assert (mib, len(units), unreadable) == (size, number, [])
    assert fit_units(config.corpus, None)[1] == plan_units(config.corpus, 32.0)[0]
    config = make_config(corpus, unit_mib=0.002)
    units, _ = plan_units(config.corpus, config.unit_mib)
    assert [unit.name for unit in units] == [f"{number:05d}" for number in range(len(units))]
    assert sum(unit.num_bytes for unit in units) == corpus.stat().st_size
    args = units, config.corpus, config.content, config.seed
    sample = list(sample_texts(*args, 0.004))
    assert sample == list(sample_texts(*args, 0.004))
    assert 4000 < sum(map(len, sample)) < 4000 + 500 * len(units)
    assert len(set(sample)) == len(sample) >= len(units) > 4
    assert len(list(sample_texts(*args, 100))) == 30


OUTPUTS = [("s3://bucket", ("folder", "bucket")), ("s3://", ("bucket", "s3://BUCKET/FOLDER"))]
OUTPUTS += [("s3://key:secret@bucket/x", "credentials"), ("http://127.0.0.1:1/x", "nothing can be")]
OUTPUTS += [("s3://bucket/x?endpoint_override=http://127.0.0.1:1", ("nothing can be", "is not reached"))]
OUTPUTS += [("nothing://bucket/x", ("nothing can be", "Protocol not known"))]


@pytest.mark.slow
@pytest.mark.parametrize(("output", "words"), OUTPUTS)
def test_an_address_that_cannot_take_the_shards_is_found_before_any_work(make_config, corpus, output, words):
    says(problems(make_config(corpus, output=output, storage_retry_seconds=0)), words)


PATTERNS = ["**/*.jsonl", "*.jsonl", "*/*.jsonl", "*/*.arrow", "**/*.txt", "**/*", "*/*", "*", "**/o?t/**/*.gz"]
PATTERNS += ["**/keys/*", "*/candidates/**/*.json", ".out/*.jsonl", "[a-m]*/**/*.json"]


@pytest.mark.parametrize("output", ["out", "deep/out", ".out"])
def test_an_output_whose_files_a_pattern_would_find_is_refused(tmp_path, output):
    for name in config_module._WRITTEN:
        (tmp_path / output / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / output / name).touch()
    for pattern in PATTERNS:
        inputs = [f"{tmp_path}/{pattern}"]
        problems = output_place_problems(str(tmp_path / output), inputs)
        assert bool(problems) == bool(list(find_inputs(inputs[0], Skipped()))), pattern
        assert not problems or says(problems, repr(inputs[0]), "another folder") is None
        assert not output_place_problems(str(tmp_path / output), inputs, excludes=True)
    (tmp_path / output / "manifest.json").touch()
    assert not output_place_problems(str(tmp_path / output), [f"{tmp_path}/**/*.json"]), "nothing is written then"
    for others in (["s3://bucket/in/**", "s3://bucket/in/*.arrow"], ["s3://bucket/in/", "s3://bucket/i", "here"]):
        (problem,) = output_place_problems("s3://bucket/in/out/?region=x", others)
        says(problem, f"input {others[0]!r}")


TOKENIZER = {"kind": "train", "vocab_size": 300}
FILES = {"kind": "files", "paths": ["a.jsonl"]}


def valid(content, **changes):
    kind = content if isinstance(content, str) else content["kind"]
    own = {} if kind in ("images", "audio") else {"tokenizer": TOKENIZER}
    return PipelineConfig.model_validate({"output": "out", "corpus": FILES, "content": content} | own | changes)


def test_a_kind_alone_is_a_section_documents_are_the_default_and_media_need_no_tokenizer(tmp_path):
    for kind in ("documents", "pairs"):
        assert (valid(kind), config_hash(valid(kind))) == (valid({"kind": kind}), config_hash(valid({"kind": kind})))
    plain = PipelineConfig.model_validate({"output": "out", "corpus": FILES, "tokenizer": TOKENIZER})
    assert identity(valid("documents")) == identity(plain)
    assert identity(valid("pairs"))["content"]["premise"] == "premise"
    assert not {"geometry", "short_documents"} & identity(valid("pairs")).keys()
    config = valid("images")
    assert config.tokenizer is None
    keys = {"corpus", "content", "duplicates", "write_rejected", "validation_fraction", "unit_mib", "seed"}
    assert identity(config).keys() == keys | {"record_batch_rows"}
    for content in ("documents", "sentences", "pairs"):
        with pytest.raises(ValidationError, match=r"tokenizer\n  Field required"):
            PipelineConfig.model_validate({"output": "out", "corpus": FILES, "content": content})
    (tmp_path / "c.yaml").write_text("prepare: {output: out, corpus: {kind: files, paths: [in]}, seed: -1}")
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "c.yaml"), "prepare", PipelineConfig)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["tokenizer:", "seed"]


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("images", {"tokenizer": TOKENIZER}, ("tokenizer", "no effect", "content.kind = images")),
        ("images", {"geometry": {"max_tokens": 64}}, ("geometry", "no effect", "content.kind = images")),
        ("sentences", {"geometry": {"max_tokens": 64}}, ("geometry", "no effect", "content.kind = sentences")),
        ("images", {"short_documents": "shrink_spans"}, ("short_documents", "no effect")),
        ("pairs", {"short_documents": "shrink_spans"}, ("short_documents", "no effect", "content.kind")),
        ("images", {"filters": {"gopher": {}}}, ("filters.gopher", "texts", "content.kind = images")),
        ("images", {"filters": {"language": {"keep": ["en"]}}}, ("filters.language", "texts")),
        ("images", {"filters": {"contamination": {"paths": ["x"]}}}, ("filters.contamination", "texts")),
        ("images", {"filters": {"normalise_whitespace": False}}, ("filters.normalise_whitespace", "texts")),
        ("pairs", {"filters": {"gopher": {}}}, ("filters.gopher", "long documents")),
        ("triples", {"filters": {"c4": {}}}, ("filters.c4", "long documents")),
        ("triples", {"filters": {"repetition": {}}}, "filters.repetition"),
        ("pairs", {"filters": {"boilerplate": {}}}, "filters.boilerplate"),
        ("images", {"duplicates": {"near": {}}}, ("duplicates.near", "words", "exact")),
        ("images", {"corpus": {"kind": "python_docs"}}, ("corpus.kind = python_docs", "no images")),
        ("pairs", {"corpus": {"kind": "python_docs"}}, ("corpus.kind = python_docs", "no pairs")),
        ("images", {"corpus": FILES | {"text_field": "x"}}, ("content.image", "Parquet")),
        ("pairs", {"corpus": FILES | {"text_field": "x"}}, "content.premise"),
        ("images", {"corpus": FILES | {"format": "jsonl"}}, ("corpus.format = jsonl", "no effect")),
        ("triples", {"corpus": FILES | {"format": "text"}}, ("corpus.format = text", "no columns")),
        ({"kind": "pairs", "premise": "label"}, {}, "same key"),
        ({"kind": "images", "label": "(a)(b)"}, {}, ("2 groups", "label")),
        ({"kind": "images", "label": "cats"}, {}, "0 groups"),
        ({"kind": "images", "label": "(a"}, {}, "regular expression"),
        ({"kind": "images", "max_labels": 0}, {}, ("greater than", "1")),
        ({"kind": "images", "max_labels": 2, "label": None}, {}, ("content.label = null", "no labels")),
        ({"kind": "images", "max_labels": 2}, {"duplicates": {"exact": False}}, "duplicates.exact=true"),
        ({"kind": "images", "shortest_edge": 0}, {}, ("greater than", "8")),
        ({"kind": "audio", "max_seconds": 0}, {}, "greater than 0"),
        ({"kind": "audio", "shortest_edge": 8}, {}, "Extra inputs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(content, changes, message):
    with pytest.raises(ValidationError, match=all_of(message)):
        valid(content, **changes)


PREPARE = """
import json, resource, sys
from pathlib import Path
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
config = PipelineConfig.model_validate(json.loads(sys.argv[1]))
units, _ = plan_units(config.corpus, config.unit_mib, None, config.content)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for unit in units:
    counts = write_unit(unit, Path(config.output), config, None, None).counts
modules = [name for name in ("torch", "transformers.modeling_utils") if name in sys.modules]
print(json.dumps([counts.model_dump(), before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, modules]))
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
@pytest.mark.parametrize("kind", ["images", "audio"])
def test_memory_does_not_grow_with_the_corpus(kind, tmp_path):
    """80 MiB of stored rows, one sound of a claimed hour and a large image need far less."""
    if kind == "images":
        pictures = [png(n, (256, 256)) for n in range(20)]
        files = {f"a/{n}.png": pictures[n % 20] for n in range(400)}
        files["a/large.jpg"] = stored(Image.new("RGB", (6000, 4000), "red"), "JPEG")
    else:
        files = {f"a/{n}.wav": sound(tone(8.0, 8000, n % 20), 8000) for n in range(200)}
        files["a/long.flac"] = sound(tone(600.0, 8000), 8000, format="FLAC")
    settings = {"content": kind, "unit_mib": 1024, "duplicates": {"exact": False}, "record_batch_rows": 1000}
    values = values_of(spread(tmp_path / "in", files), tmp_path / "out", **settings)
    counts, before, peak, modules = json.loads(run_python("-c", PREPARE, json.dumps(values)).stdout)
    assert counts["kept"] == len(files)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.arrow")) > 70 << 20
    assert (peak - before) / 1024 < 260
    assert modules == []


def test_all_problems_are_told_at_once(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"prepare": {"output": "o", "corpus": FILES, "tokenizer": TOKENIZER}}))

    def load(*overrides):
        return load_config(str(path), "prepare", PipelineConfig, overrides)

    with pytest.raises(ConfigError) as error:
        load("content=pairs", "geometry.num_anchors=3", "filters.c4={}")
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match=all_of("filters.quality.column", "unknown key", "known here", "c4")) as error:
        load("filters.quality={column: quality, min: 0.5}")
    assert "did you mean" not in str(error.value)
    contents = {"sentence": "documents, sentences, pairs, triples"}
    contents |= {"{kind: pairs, required_labels: [entails]}": "content.required_labels.0"}
    for content, words in (contents | {"{kind: sentences, language: English}": "content.language"}).items():
        with pytest.raises(ConfigError, match=all_of(words)):
            load(f"content={content}")
    assert load("content.kind=pairs", "content.premise=sentence1").content.premise == "sentence1"
