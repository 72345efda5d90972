"""Settings of images and audio: what is needed, what is refused, and what makes up their identity."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mediafiles import png, sound, spread, stored, tone
from messages import all_of, says
from PIL import Image
from pydantic import ValidationError

from declutr.common.config import load_config
from declutr.common.config_docs import annotated_yaml
from declutr.common.errors import ConfigError
from declutr.pipeline.config import PipelineConfig, identity

BASE = {"output": "out", "corpus": {"kind": "files", "paths": ["in"]}}


def test_no_tokenizer_is_needed_and_texts_still_need_one():
    config = PipelineConfig.model_validate(BASE | {"content": "images"})
    assert config.tokenizer is None
    assert identity(config).keys() == {
        "corpus", "content", "duplicates", "write_rejected", "validation_fraction", "unit_mib", "record_batch_rows",
        "seed",
    }  # fmt: skip
    for content in ("documents", "sentences", "pairs"):
        with pytest.raises(ValidationError, match=r"tokenizer\n  Field required"):
            PipelineConfig.model_validate(BASE | {"content": content})


def test_a_missing_tokenizer_is_told_with_other_problems(tmp_path):
    (tmp_path / "c.yaml").write_text("prepare: {output: out, corpus: {kind: files, paths: [in]}, seed: -1}")
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "c.yaml"), "prepare", PipelineConfig)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == ["tokenizer:", "seed"]
    says(caught.value, "missing", "default")


def test_printed_settings_can_be_given_back(tmp_path):
    config = PipelineConfig.model_validate(BASE | {"content": {"kind": "audio", "label": r"^(\d)_"}})
    lines = "".join(f"  {line}\n" for line in annotated_yaml(config).splitlines())
    (tmp_path / "c.yaml").write_text(f"prepare:\n{lines}")
    assert load_config(str(tmp_path / "c.yaml"), "prepare", PipelineConfig) == config


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokenizer": {"kind": "train", "vocab_size": 300}}, ("tokenizer", "no effect", "content.kind = images")),
        ({"geometry": {"max_tokens": 64}}, ("geometry", "no effect", "content.kind = images")),
        ({"short_documents": "shrink_spans"}, ("short_documents", "no effect")),
        ({"filters": {"gopher": {}}}, ("filters.gopher", "texts", "content.kind = images")),
        ({"filters": {"language": {"keep": ["en"]}}}, ("filters.language", "texts")),
        ({"filters": {"contamination": {"paths": ["x"]}}}, ("filters.contamination", "texts")),
        ({"filters": {"normalise_whitespace": False}}, ("filters.normalise_whitespace", "texts")),
        ({"duplicates": {"near": {}}}, ("duplicates.near", "words", "exact")),
        ({"corpus": {"kind": "python_docs"}}, ("corpus.kind = python_docs", "no images")),
        ({"corpus": BASE["corpus"] | {"text_field": "x"}}, ("content.image", "Parquet")),
        ({"corpus": BASE["corpus"] | {"format": "jsonl"}}, ("corpus.format = jsonl", "no effect")),
        ({"content": {"kind": "images", "label": "(a)(b)"}}, ("2 groups", "label")),
        ({"content": {"kind": "images", "label": "cats"}}, "0 groups"),
        ({"content": {"kind": "images", "label": "(a"}}, "regular expression"),
        ({"content": {"kind": "images", "max_labels": 0}}, ("greater than", "1")),
        ({"content": {"kind": "images", "max_labels": 2, "label": None}}, ("content.label = null", "no labels")),
        ({"content": {"kind": "images", "max_labels": 2}, "duplicates": {"exact": False}}, "duplicates.exact=true"),
        ({"content": {"kind": "images", "shortest_edge": 0}}, ("greater than", "8")),
        ({"content": {"kind": "audio", "max_seconds": 0}}, "greater than 0"),
        ({"content": {"kind": "audio", "shortest_edge": 8}}, "Extra inputs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, told):
    with pytest.raises(ValidationError, match=all_of(told)):
        PipelineConfig.model_validate(BASE | {"content": "images"} | changes)


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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units")
@pytest.mark.parametrize("kind", ["images", "audio"])
def test_memory_does_not_grow_with_the_corpus(kind, tmp_path):
    """80 MiB of stored rows, one sound of a claimed hour and a large image need far less."""
    if kind == "images":
        some = [png(n, (256, 256)) for n in range(20)]
        files = {f"a/{n}.png": some[n % 20] for n in range(400)}
        files["a/large.jpg"] = stored(Image.new("RGB", (6000, 4000), "red"), "JPEG")
    else:
        some = [sound(tone(8.0, 8000, n), 8000) for n in range(20)]
        files = {f"a/{n}.wav": some[n % 20] for n in range(200)}
        files["a/long.flac"] = sound(tone(600.0, 8000), 8000, format="FLAC")
    values = {"output": str(tmp_path / "out"), "duplicates": {"exact": False}, "content": kind}
    values["corpus"] = {"kind": "files", "paths": [str(spread(tmp_path / "in", files))]}
    values["unit_mib"] = 1024
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PREPARE, json.dumps(values)], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    counts, before, most, modules = json.loads(done.stdout)
    assert counts["kept"] == len(files)
    assert sum(path.stat().st_size for path in (tmp_path / "out").glob("*.arrow")) > 70 << 20
    assert (most - before) / 1024 < 260
    assert modules == []


def test_tasks_for_texts_import_no_decoders():
    code = "import sys, declutr.pipeline.job.worker, declutr.pipeline.prepare; print(*sys.modules)"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert not {"PIL", "soundfile", "transformers.audio_utils", "scipy.signal"} & set(done.stdout.split())
