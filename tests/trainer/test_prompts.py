"""A prompt before every span: its tokens, what is masked, the settings that choose it, and the export that keeps it."""

import dataclasses
import json

import numpy as np
import pytest
import tinyruns as runs
import torch
from messages import all_of, says
from preparing import prepare_rows
from tiny import VOCABULARY
from tinyruns import problems
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from declutr.adaptation.candidates import document_prompt, load_transformer
from declutr.adaptation.passages import make_passages
from declutr.trainer.build import build_encoder, build_parts, build_validator
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import pack_spans
from declutr.trainer.data.packing import MaskingConfig
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.language_model import vocabulary_of
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan

PROMPTS = {"query": "query: ", "passage": "passage: "}


def packed(vocabulary, queries=None):
    tokens, masking = np.arange(4, 44, dtype=np.int64), (MaskingConfig(), slice(0, 2))
    sources, content, keys = np.array([0, 20]), np.array([20, 15]), np.array([7, 8], np.uint64)
    epochs, numbers = np.zeros(2, np.uint64), np.zeros(2, np.int64)
    spans = pack_spans(tokens, sources, content, vocabulary, 0, keys, epochs, numbers, masking, queries=queries)
    return spans, [row.tolist() for row in spans.input_ids.split(spans.lengths.tolist())]


def test_a_prompt_stands_behind_the_first_special_token_and_is_never_masked():
    prompted = dataclasses.replace(VOCABULARY, prompt=(50, 51, 52))
    (spans, rows), (plain, plain_rows) = packed(prompted), packed(VOCABULARY)
    assert prompted.num_specials == VOCABULARY.num_specials + 3
    assert rows == [[row[0], 50, 51, 52, *row[1:]] for row in plain_rows], "the same masks"
    assert {row[0] for row in rows} == {VOCABULARY.bos}
    assert spans.labels.equal(plain.labels)
    moved = torch.where(plain.selected < plain.lengths[0], 3, 6)  # tokens of prompts before a span's content
    assert (spans.selected - plain.selected).equal(moved)


@pytest.mark.parametrize("own", [(), (60,), (60, 61, 62, 63)])
def test_a_query_has_a_prompt_of_its_own(own):
    prompted = dataclasses.replace(VOCABULARY, prompt=(50, 51, 52), query_prompt=own)
    vocabularies = prompted, dataclasses.replace(prompted, query_prompt=None)
    (mixed, rows), (alike, (before, after)) = (packed(v, np.array([False, True])) for v in vocabularies)
    assert rows == [before, [after[0], *own, *after[4:]]]
    assert mixed.input_ids[mixed.selected].equal(alike.input_ids[alike.selected]), "the same masks"
    assert mixed.labels.equal(alike.labels)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.word_shards(tmp_path_factory.mktemp("data") / "out")


@pytest.fixture
def pretrained(data, tmp_path):
    folder, tokenizer = tmp_path / "pretrained", AutoTokenizer.from_pretrained(data / "tokenizer")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=96, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


def config_of(data, tmp_path, encoder, spans=None):
    values = runs.train_values(data, tmp_path / "run", batch_documents=16, spans=spans or {})
    return TrainConfig.model_validate(values | {"encoder": {"dropout": 0.0, **encoder}})


def test_declared_prompts_must_be_chosen_or_declined(data, tmp_path, pretrained):
    encoder = {"pretrained": str(pretrained)}
    (problem,) = problems(config_of(data, tmp_path, encoder))
    says(problem, "declares prompts", "query = 'query: '", "passage = 'passage: '", "encoder.prompt")
    for prompt in ("passage: ", "another: ", ""):
        assert problems(config_of(data, tmp_path, encoder | {"prompt": prompt})) == []
    (problem,) = problems(config_of(data, tmp_path, encoder | {"prompt": "word " * 200}))
    says(problem, "encoder.prompt leaves 0 of the encoder's 96 positions")


def test_a_prompt_of_queries_needs_queries_and_room_for_them(data, tmp_path, pretrained):
    encoder = {"pretrained": str(pretrained), "prompt": "passage: ", "query_prompt": "query: "}
    with pytest.raises(ValueError, match=all_of("encoder.query_prompt", "spans.query_share")):
        config_of(data, tmp_path, encoder)
    spans = {"query_share": 0.5, "query_tokens": [2, 4]}
    assert problems(config_of(data, tmp_path, encoder, spans=spans)) == []
    (problem,) = problems(config_of(data, tmp_path, encoder | {"query_prompt": "word " * 95}, spans=spans))
    says(problem, "encoder.query_prompt leaves 0 of the encoder's 96")
    (problem,) = problems(config_of(data, tmp_path, encoder, spans={"query_share": 0.5, "query_tokens": [2, 90]}))
    says(problem, "spans.query_tokens = [2, 90]", "spans.min_tokens")


def of_pairs(pairs, tmp_path, max_tokens=20, **changes):
    objective = {"kind": "simcse", "supervised": True, "hard_negatives": False, "max_tokens": max_tokens}
    encoder = {"prompt": "text: ", "query_prompt": "asked: "}
    return runs.train_config(pairs, tmp_path / "run", objective=objective, encoder=encoder, **changes)


def test_prompts_of_pairs_are_validated_and_refused_if_they_are_as_long_as_a_text(tmp_path):
    rows = [{"query": f"a question about {n}", "text": f"the answer is {n} and {n % 7} more"} for n in range(60)]
    content = {"kind": "pairs", "premise": "query", "hypothesis": "text", "label": None}
    pairs, _ = prepare_rows(tmp_path / "pairs", content, rows)
    plan = RunPlan.of(of_pairs(pairs, tmp_path, validation={"every_steps": 1}))
    parts = build_parts(plan, Communicator(), torch.device("cpu"))
    ((_, validator),) = build_validator(plan, parts, torch.device("cpu")).parts
    assert validator.collator.vocabulary.query_prompt
    assert validator.collator.vocabulary == parts.collators[""].vocabulary
    tokenizer = AutoTokenizer.from_pretrained(pairs / "tokenizer")
    num_specials = vocabulary_of(tokenizer, "text: ", "asked: ").num_specials
    assert problems(of_pairs(pairs, tmp_path, num_specials + 1)) == []
    (problem,) = problems(of_pairs(pairs, tmp_path, num_specials))
    says(problem, f"objective.max_tokens = {num_specials}", "encoder.query_prompt", num_specials + 1)
    task = {"data": str(pairs), "objective": of_pairs(pairs, tmp_path, num_specials).objective.model_dump()}
    (problem,) = problems(of_pairs(pairs, tmp_path, auxiliary_tasks={"more": task}))
    says(problem, f"auxiliary_tasks.more.objective.max_tokens = {num_specials}", num_specials + 1)


def exported(data, tmp_path, pretrained, prompt, **settings):
    """The folder of an export, and the prompts and the name of the default one that it declares."""
    encoder = {"pretrained": str(pretrained), "prompt": prompt, **settings}
    config = config_of(data, tmp_path, encoder, spans={"query_share": 0.5, "query_tokens": [2, 4]})
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    write_encoder(build_encoder(config, tokenizer), tokenizer, tmp_path / "export")
    declared = json.loads((tmp_path / "export" / "config_sentence_transformers.json").read_text())
    return tmp_path / "export", declared["prompts"], declared.get("default_prompt_name")


def test_an_export_declares_the_prompts_of_its_start_and_of_its_training(data, tmp_path, pretrained):
    for prompt, default in (("passage: ", None), ("", None), ("another: ", "another: ")):
        _, prompts, name = exported(data, tmp_path / f"prompt {prompt}", pretrained, prompt)
        assert (prompts.pop(name, None), prompts) == (default, PROMPTS)
    folder, prompts, _ = exported(data, tmp_path, pretrained, "text: ", query_prompt="asked: ")
    assert prompts == {**PROMPTS, "query": "asked: ", "document": "text: "}
    encoder = load_transformer(folder)
    assert [encoder.in_role(role).prompt for role in ("query", "document")] == ["asked: ", "text: "]
    assert exported(data, tmp_path / "same", pretrained, "passage: ", query_prompt="query: ")[1] == PROMPTS


def test_passages_begin_as_a_text_with_its_prompt_does(data, tmp_path, pretrained):
    encoder = load_transformer(exported(data, tmp_path, pretrained, "passage: ")[0])
    prompt = vocabulary_of(encoder.tokenizer, document_prompt(encoder)).prompt
    body = " ".join(f"word{number % 30}" for number in range(200))
    plain, prompted = (make_passages([body], encoder.tokenizer, put) for put in ("", document_prompt(encoder)))
    for before, after in zip(plain.ids, prompted.ids, strict=True):
        assert after == [before[0], *prompt, *before[1:]]
    text = encoder.in_role("document").engine().encode(document_prompt(encoder) + body).ids
    assert text[: 1 + len(prompt)] == prompted.ids[0][: 1 + len(prompt)]
