"""Settings of `content`: what is refused, and what stays the same for documents."""

import textwrap

import pytest
from messages import all_of
from pydantic import ValidationError

from declutr.common.config import load_config
from declutr.common.errors import ConfigError
from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.prepare import main
from declutr.pipeline.shards.content import DocumentsContent
from declutr.pipeline.shards.shards import ShardSet

BASE = {
    "output": "out",
    "corpus": {"kind": "files", "paths": ["a.jsonl"]},
    "tokenizer": {"kind": "train", "vocab_size": 300},
}


def test_documents_are_the_default():
    plain = PipelineConfig.model_validate(BASE)
    assert plain.content == DocumentsContent()
    for content in ("documents", {"kind": "documents"}):
        named = PipelineConfig.model_validate(BASE | {"content": content})
        assert identity(named) == identity(plain)


def test_a_kind_alone_is_a_section():
    short, long = (PipelineConfig.model_validate(BASE | {"content": c}) for c in ("pairs", {"kind": "pairs"}))
    assert short == long
    assert config_hash(short) == config_hash(long)
    assert identity(short)["content"]["premise"] == "premise"
    assert not {"geometry", "short_documents"} & identity(short).keys()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"content": "sentences", "geometry": {"max_tokens": 64}},
            ("geometry", "no effect", "content.kind = sentences"),
        ),
        ({"content": "pairs", "short_documents": "shrink_spans"}, ("short_documents", "no effect", "content.kind")),
        ({"content": "pairs", "filters": {"gopher": {}}}, ("filters.gopher", "long documents")),
        ({"content": "triples", "filters": {"c4": {}}}, ("filters.c4", "long documents")),
        ({"content": "triples", "filters": {"repetition": {}}}, "filters.repetition"),
        ({"content": "pairs", "filters": {"boilerplate": {}}}, "filters.boilerplate"),
        ({"content": "pairs", "corpus": {"kind": "python_docs"}}, ("corpus.kind = python_docs", "no pairs")),
        ({"content": "pairs", "corpus": BASE["corpus"] | {"text_field": "x"}}, "content.premise"),
        ({"content": "triples", "corpus": BASE["corpus"] | {"format": "text"}}, ("corpus.format = text", "no columns")),
        ({"content": {"kind": "pairs", "premise": "label"}}, "same key"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, told):
    with pytest.raises(ValidationError, match=all_of(told)):
        PipelineConfig.model_validate(BASE | changes)


def test_all_problems_are_told_at_once(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "prepare: {output: o, corpus: {kind: files, paths: [a]}, tokenizer: {kind: train, vocab_size: 300}}"
    )
    with pytest.raises(ConfigError) as error:
        load_config(str(path), "prepare", PipelineConfig, ["content=pairs", "geometry.num_anchors=3", "filters.c4={}"])
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match=all_of("documents, sentences, pairs, triples")):
        load_config(str(path), "prepare", PipelineConfig, ["content=sentence"])
    with pytest.raises(ConfigError, match=r"content\.required_labels"):
        load_config(str(path), "prepare", PipelineConfig, ["content={kind: pairs, required_labels: [entails]}"])
    with pytest.raises(ConfigError, match=r"content\.language"):
        load_config(str(path), "prepare", PipelineConfig, ["content={kind: sentences, language: English}"])
    found = load_config(str(path), "prepare", PipelineConfig, ["content.kind=pairs", "content.premise=sentence1"])
    assert found.content.premise == "sentence1"


def test_a_printed_config_can_be_used_again(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    path.write_text(
        "prepare: {output: o, corpus: {kind: files, paths: [a]}, tokenizer: {kind: train, vocab_size: 300}, "
        "content: {kind: pairs, required_labels: [entailment]}}"
    )
    assert main([str(path), "--print-config"]) == 0
    again = tmp_path / "again.yaml"
    again.write_text("prepare:\n" + textwrap.indent(capsys.readouterr().out, "  "))
    before, after = (load_config(str(one), "prepare", PipelineConfig) for one in (path, again))
    assert before == after


def test_shards_of_documents_have_no_columns_of_texts(tmp_path, make_texts, prepare_units, write_jsonl):
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": f"number {n} " * 40} for n in range(5)))
    config = make_texts("documents", path, geometry={"num_anchors": 1, "max_tokens": 8})
    _, _, folder = prepare_units(config)
    schema = ShardSet(folder, "train").take([0]).schema
    assert schema.names == ["id", "tokens", "windows", "num_tokens", "source", "offset"]
    keys = {b"schema_version", b"tokenizer_fingerprint", b"vocab_size", b"num_anchors", b"max_tokens"}
    assert schema.metadata.keys() == keys
