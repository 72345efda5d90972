"""Prompts of queries and documents from embedding to search, against sentence-transformers."""

import json

import numpy as np
import pytest
from folders import TEXTS, encoder_folder, jsonl, write
from messages import all_of, says
from sentence_transformers import SentenceTransformer

import declutr
from declutr.cli.main import main
from declutr.common.errors import EncoderError
from declutr.embedding.note import read_note
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import in_role

E5 = {"query": "query: ", "passage": "passage: "}
PASSAGE = {"prompt_name": "passage"}
DOCUMENTS = ["one two three", "naïve façade", "word and more", "ab cd"]


def prompted(folder, prompts=E5, include=True, pooling="mean", **options):
    path = encoder_folder(folder, pooling=pooling, max_tokens=20, prompts=prompts, **options)
    settings = {"word_embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": include}
    write(path / "1_Pooling/config.json", settings)
    return path


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize(
    ("prompts", "default", "query", "document"),
    [
        (E5, None, "query: ", "passage: "),
        ({"query": "query: ", "document": ""}, None, "query: ", ""),
        ({"query": "", "document": "text: ", "passage": "passage: "}, "query", "", "text: "),
        ({"corpus": "text: ", "other": "other: "}, "other", "", "text: "),
        ({"query": "", "document": ""}, None, "", ""),
        ({"other": "other: "}, "other", "other: ", "other: "),  # of every text
    ],
)
def test_roles_have_the_embeddings_of_sentence_transformers(
    tmp_path, include, pooling, prompts, default, query, document
):
    path = prompted(tmp_path / "encoder", prompts, include, pooling, default_prompt_name=default)
    encoder, theirs = load_encoder(path, device="cpu"), SentenceTransformer(str(path), device="cpu")
    close(encoder.encode(TEXTS), theirs.encode(TEXTS))
    close(in_role(encoder, "query").encode(TEXTS), theirs.encode(TEXTS, prompt=query))
    close(in_role(encoder, "document").encode(TEXTS), theirs.encode(TEXTS, prompt=document))
    close(load_encoder(path, device="cpu", role="query").encode(TEXTS), theirs.encode(TEXTS, prompt=query))
    assert in_role(encoder, "query") is in_role(encoder, "query"), "a service asks for it at every query"
    if "passage" not in prompts and "corpus" not in prompts and default is None:
        close(in_role(encoder, "document").encode(TEXTS), theirs.encode_document(TEXTS))


def test_prompts_of_the_user_replace_those_of_the_folder(tmp_path):
    plain, path = prompted(tmp_path / "plain", {}), prompted(tmp_path / "encoder")
    theirs = SentenceTransformer(str(path), device="cpu")
    given = load_encoder(plain, device="cpu", query_prompt="query: ", document_prompt="passage: ")
    close(in_role(given, "query").encode(TEXTS), theirs.encode_query(TEXTS))
    close(in_role(given, "document").encode(TEXTS), theirs.encode(TEXTS, **PASSAGE))
    assert given.fingerprint != load_encoder(plain, device="cpu").fingerprint


def test_a_search_asks_with_the_prompt_of_queries_and_compares_documents_with_theirs(tmp_path, capsys):
    path = prompted(tmp_path / "encoder")
    (tmp_path / "in.txt").write_text("\n".join(DOCUMENTS) + "\n")
    output = tmp_path / "documents.npy"
    assert main(["embed", str(path), str(tmp_path / "in.txt"), "--output", str(output)]) == 0
    says(capsys.readouterr().err, "'passage: '", "before every text")
    theirs = SentenceTransformer(str(path), device="cpu")
    close(np.load(output), theirs.encode(DOCUMENTS, **PASSAGE))
    assert read_note(output).config.choice.role == "document"
    declutr.index(output, tmp_path / "index")
    vectors, query = theirs.encode(DOCUMENTS, **PASSAGE), theirs.encode_query(["two words"])[0]
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    hits = declutr.search(tmp_path / "index", "two words")
    assert [hit.text for hit in hits] == [DOCUMENTS[place] for place in np.argsort(-cosines)]
    close([hit.cosine for hit in hits], np.sort(cosines)[::-1])


def test_an_index_keeps_the_users_prompt_of_queries(tmp_path):
    plain = prompted(tmp_path / "plain", {})
    (tmp_path / "in.txt").write_text("\n".join(DOCUMENTS) + "\n")
    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    declutr.embed(plain, tmp_path / "in.txt", tmp_path / "d.npy", **prompts)
    declutr.index(tmp_path / "d.npy", tmp_path / "index")
    hit = declutr.search(tmp_path / "index", "ab cd", 1)[0]
    theirs = SentenceTransformer(str(plain), device="cpu")
    first, second = theirs.encode(["query: ab cd", f"passage: {hit.text}"])
    close(hit.cosine, first @ second / np.linalg.norm(first) / np.linalg.norm(second))


@pytest.mark.parametrize(("role", "put"), [("query", "query: "), ("document", "passage: ")])
def test_embed_takes_the_role_that_it_is_told(tmp_path, role, put):
    path = prompted(tmp_path / "encoder")
    (tmp_path / "in.txt").write_text("ab cd\n")
    declutr.embed(path, tmp_path / "in.txt", tmp_path / "out.npy", role=role)
    close(np.load(tmp_path / "out.npy"), SentenceTransformer(str(path), device="cpu").encode([f"{put}ab cd"]))


def test_a_role_of_an_encoder_without_prompts_is_said_to_have_no_effect(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("ab cd\n")
    path = prompted(tmp_path / "plain", {})
    assert (
        main(["embed", str(path), str(tmp_path / "in.txt"), "--output", str(tmp_path / "o.npy"), "--role", "query"])
        == 0
    )
    says(capsys.readouterr().err, "--role query: has no effect", "declares no prompts")


def test_pairs_are_scored_with_both_prompts(tmp_path):
    path, plain = prompted(tmp_path / "encoder"), prompted(tmp_path / "plain", {})
    pairs = jsonl(tmp_path / "pairs.jsonl", [{"query": text[:4], "text": text} for text in DOCUMENTS])
    by_folder = declutr.evaluate(path, pairs=pairs, output=tmp_path / "first")["pairs"]
    by_options = declutr.evaluate(
        plain, pairs=pairs, output=tmp_path / "second", query_prompt="query: ", document_prompt="passage: "
    )["pairs"]
    without = declutr.evaluate(plain, pairs=pairs, output=tmp_path / "third")["pairs"]
    scores = [list(file["scores"].values()) for file in (by_folder, by_options, without)]
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]


def test_texts_without_a_role_are_said_to_have_no_prompt(tmp_path, caplog):
    encoder = load_encoder(prompted(tmp_path / "encoder"), device="cpu")
    encoder.encode(["ab cd"])
    encoder.encode(["ab cd"])
    lines = [line for line in caplog.messages if "no prompt goes before" in line]
    assert len(lines) == 1
    says(lines, "'query: '", "'passage: '")


def test_a_graph_has_the_prompts_of_its_encoder(tmp_path):
    pytest.importorskip("onnxruntime")
    path = prompted(tmp_path / "encoder")
    declutr.export(path, tmp_path / "graph", to="onnx")
    graph, theirs = load_encoder(tmp_path / "graph"), SentenceTransformer(str(path), device="cpu")
    close(in_role(graph, "query").encode(TEXTS), theirs.encode_query(TEXTS))
    close(in_role(graph, "document").encode(TEXTS), theirs.encode(TEXTS, **PASSAGE))
    assert json.loads((tmp_path / "graph" / "declutr_onnx.json").read_text())["prompts"] == E5


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("hashed-words:8", {"query_prompt": "q: "}, ("--query-prompt 'q: '", "no effect", "hashed words")),
        ("folder", {"query_prompt": "x" * 20_000}, ("prompt has 20,000 characters", "16,384")),
        ("unpooled", {"long_texts": "windows", "role": "query"}, ("leaves its prompt out", "long_texts = cut")),
        ("unpooled", {"max_tokens": 4, "role": "query"}, ("its prompt fills the 4 tokens",)),
    ],
)
def test_prompts_that_cannot_be_applied_are_refused(tmp_path, name, options, words):
    path = name if ":" in name else prompted(tmp_path / "encoder", include=name != "unpooled")
    with pytest.raises(EncoderError, match=all_of(*words)):
        load_encoder(path, device="cpu", **options).encode(["one two three four five six seven eight nine ten " * 3])
