"""`declutr adapt` from documents to a verdict, with a tiny encoder."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from adapting import WORDS, corpus
from folders import jsonl
from messages import all_of, says
from pages import checked
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from declutr.adaptation import scores as adaptation_scores
from declutr.adaptation.candidates import CLOSED, ORDER, TRAINED, CandidateBuilder, document_prompt, load_transformer
from declutr.adaptation.checks import as_options
from declutr.adaptation.config import PAIRS_DATA, PAIRS_FILE, AdaptConfig, opened
from declutr.adaptation.job import _Adaptation, adapt
from declutr.adaptation.passages import _select, held_out_documents, make_passages
from declutr.adaptation.result import Result
from declutr.cli.main import main
from declutr.common.bootstrap import Comparison, grouped
from declutr.common.config import load_config
from declutr.common.errors import ConfigError, EncoderError, UsageError
from declutr.common.paths import listed
from declutr.encoders.loading import load_encoder
from declutr.encoders.transformer import TransformerEncoder, write_transformer
from declutr.evaluation.retrieval.compare import score_encoder, score_lexical
from declutr.evaluation.retrieval.lexicon import Lexicon
from declutr.evaluation.retrieval.pairs import read_test
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.job.outcome import too_many_failed
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.ledger import Counts, Losses
from declutr.pipeline.shards.manifest import load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.tokenizer.tokenization import fingerprint
from declutr.trainer.model.behind import Normalize

PROMPTS = {"query": "search: ", "document": "text: "}


def limited(encoder, folder):
    """The encoder with an own limit of its input, prompts for both roles, and a normalisation at its end."""
    folder.mkdir()
    start = dataclasses.replace(load_transformer(str(encoder)), max_tokens=80, prompts=PROMPTS)
    write_transformer(start, [Normalize()], folder)
    return folder


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_adapt_tries_every_candidate_and_judges_one(encoder, tmp_path):
    documents, output = corpus(tmp_path / "documents.jsonl", 700), tmp_path / "adapted"
    encoder = limited(encoder, tmp_path / "start")
    result = adapt(encoder, documents, output, steps=20)
    written = json.loads((output / "result.json").read_text())
    baselines, hybrid = ["start", "BM25", "IDF cosine", "start + IDF cosine"], f"{result.chosen} + IDF cosine"
    assert [row["name"] for row in written["rows"]] == [*baselines, *ORDER, hybrid]
    assert result.chosen in ORDER
    assert result.verdict.comparison.rows >= 100
    assert (output / "encoder").exists() == (result.verdict.outcome == "better")
    assert written["steps"] == 20
    scores = {row["name"]: row["scores"]["distant"] for row in written["rows"]}
    assert scores["IDF cosine"] > 0.9  # its documents share words alone
    assert result.sentence in checked((output / "report.html").read_text()).text
    again = adapt(encoder, documents, output, steps=20)
    assert (again.sentence, again.looks) == (result.sentence, 1)
    with pytest.raises(UsageError, match=all_of("seed", "another folder")):
        adapt(encoder, documents, output, steps=20, seed=1)
    with pytest.raises(UsageError, match="holds an adaptation with another passage_tokens"):
        adapt(encoder, documents, output, steps=20, passage_tokens=32)
    settings = {"encoder": str(encoder), "corpus": listed(documents), "steps": 20}
    config = load_config(settings, "adapt", AdaptConfig).located()
    builder = CandidateBuilder(config, output / "data", output / "candidates")
    candidates = {name: load_transformer(str(builder.place(name))) for name in ORDER}
    splits = held_out_documents(config.prepare_config(output / "data").corpus, output / "data", config.seed)
    development, test = (set(splits[name]) for name in ("development", "test"))
    assert min(len(development), len(test)) >= 100
    assert not development & test, "the test documents chose none"
    shards = ShardSet(output / "data", "held-out")
    held_out = {*shards.take(np.arange(shards.num_documents))["id"].to_pylist()}
    assert {document_id(normalise(text).encode()) for text in development | test} <= held_out, "trained on"
    start = load_transformer(config.encoder)
    test = adaptation_scores.TestSet(make_passages(splits["test"], start.tokenizer, document_prompt(start)), None)
    for name, candidate in candidates.items():
        assert np.nanmean(test.encoder(candidate)["distant"]) == pytest.approx(scores[name], abs=1e-6), name
        assert (candidate.max_tokens, candidate.prompts) == (80, PROMPTS)  # an export of a training has neither
        for loaded in (candidate, SentenceTransformer(str(builder.place(name)), device="cpu")):
            assert np.linalg.norm(loaded.encode(["word1 word2", "word3"]), axis=1) == pytest.approx(1, abs=1e-5)
    with opened(config, output) as state:
        job = _Adaptation(config, output, None, state, start, None)
        for name, model in (("start", start), (result.chosen, candidates[result.chosen])):
            by_weight = {
                weight: job._scored(job.sets["development"], model, weight) for weight in adaptation_scores.WEIGHTS[1:]
            }
            weight = max(by_weight, key=lambda weight: np.nanmean(by_weight[weight]["distant"]))
            with_words = np.nanmean(test.encoder(model, weight)["distant"])
            assert scores[f"{name} + IDF cosine"] == pytest.approx(with_words, abs=1e-6), name
        assert written["words_weight"] == weight
        before, after = (f"{100 * scores[f'{name} + IDF cosine']:.1f}" for name in ("start", result.chosen))
        says(result.general, f"--weight {weight:g}", f"{before} before", f"{after} after")
        for outcome in ("better", "worse"):
            verdict = dataclasses.replace(result.verdict, outcome=outcome)
            job._finish(verdict, TRAINED, candidates[TRAINED], {}, 1, [])
            if outcome == "better":
                assert load_transformer(str(output / "encoder")).fingerprint == candidates[TRAINED].fingerprint
    assert not (output / "encoder").exists(), "a worse one is not kept"


def strict_json(path):
    """JSON as the standard has it, without NaN."""
    return json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.ray
@pytest.mark.usefixtures("session")
def test_adapt_of_many_documents_without_distant_passages_says_so_before_it_trains(encoder, tmp_path):
    result = adapt(encoder, corpus(tmp_path / "documents.jsonl", 700, words=75), tmp_path / "adapted", steps=20)
    says(result.sentence, "too few documents to tell", "0 test documents of 256 tokens or more among 700")
    assert load_manifest(tmp_path / "adapted" / "data").totals["kept"] == 700
    assert not (tmp_path / "adapted" / "candidates").exists()
    assert strict_json(tmp_path / "adapted" / "result.json")["primary_difference"]["value"] is None


def write_pairs(path, count):
    """Pairs whose texts are no documents of the corpus."""
    texts = [" ".join(words) for words in np.random.default_rng(1).choice(WORDS, (count, 12))]
    return jsonl(path, [{"query": " ".join(text.split()[:3]), "text": text} for text in texts])


@pytest.mark.ray
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("documents", "queries"), [(20, 240), (150, 200)], ids=["too few to train, and no passages", "too few to choose"]
)
def test_adapt_with_pairs_and_nothing_to_choose_tries_the_closed_form_alone(
    encoder, tmp_path, documents, queries, monkeypatch, caplog
):
    pairs = write_pairs(tmp_path / "pairs.jsonl", queries)
    halves = [len(read_test(pairs).part(which, 1).queries) for which in ("development", "test")]
    assert halves[1] >= 100
    assert (halves[0] >= 100) == (documents < 64)
    texts = corpus(tmp_path / "documents.jsonl", documents)
    if documents < 64:
        texts.write_text(texts.read_text().replace(" word1", r"\n# word1"))  # headings are taken out of passages
    result = adapt(encoder, texts, tmp_path / "adapted", pairs=str(pairs), steps=20, seed=1)
    assert [row.name for row in result.rows if row.kind == "candidate"] == [CLOSED]
    assert result.verdict.comparison.rows == halves[1]
    assert "pairs" in strict_json(tmp_path / "adapted" / "result.json")["rows"][0]["scores"]
    page = tmp_path / "adapted" / "report.html"
    says(checked(page.read_text()).text, "queries that neither trained nor chose it")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib", None)  # as Python has a module that is not installed
        assert adapt(encoder, texts, tmp_path / "adapted", pairs=str(pairs), steps=20, seed=1).looks == 1
    says(caplog.text, page, "not written", "pip install matplotlib")
    assert not page.exists()
    pairs.write_text(pairs.read_text().replace('"query": "', '"query": "word1 '))  # its halves stay
    edited = adapt(encoder, texts, tmp_path / "adapted", pairs=str(pairs), steps=20, seed=1)
    assert edited.looks == 2, "the test is another one in the same folder"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_a_third_of_the_pairs_is_trained_on_and_no_query_of_the_others(encoder, tmp_path):
    file, output = write_pairs(tmp_path / "pairs.jsonl", 400), tmp_path / "adapted"
    documents, pairs = corpus(tmp_path / "documents.jsonl", 150), read_test(file)
    result = adapt(encoder, documents, output, pairs=str(file), train_on_pairs=True, steps=20)
    queries = {pairs.queries[place] for place in pairs.places("train", 0, train=True)}
    rows = [json.loads(line) for line in (output / "training-pairs.jsonl").read_text().splitlines()]
    assert {row["query"] for row in rows} == queries
    assert load_manifest(output / "pairs").totals["kept_train"] == len(queries)
    assert result.verdict.comparison.rows == pairs.part("test", 0, train=True).num_answers
    assert [row.name for row in result.rows if row.kind == "candidate"] == list(ORDER)
    lines = (output / "candidates" / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("pairs_contrastive" in json.loads(line) for line in lines) == 20


def test_pairs_that_were_edited_after_a_candidate_learned_them_are_refused(tmp_path):
    file = write_pairs(tmp_path / "pairs.jsonl", 120)
    config = AdaptConfig(encoder=str(tmp_path), corpus=["c"], pairs=str(file), train_on_pairs=True)
    (tmp_path / PAIRS_DATA).mkdir()
    (tmp_path / PAIRS_FILE).write_text("before")
    with pytest.raises(UsageError, match=all_of(f"--pairs {file}", "have changed", "restore", "--output")):
        _ = _Adaptation(config, tmp_path, None, None, None, read_test(file)).builder
    assert (tmp_path / PAIRS_FILE).read_text() == "before"


def test_texts_of_the_pairs_are_embedded_once_for_both_splits(encoder, tmp_path):
    start, cut = load_transformer(str(encoder)), []
    pairs = read_test(write_pairs(tmp_path / "pairs.jsonl", 120))
    none, recalls = make_passages([], start.tokenizer), {}
    for split in ("development", "test"):
        half = pairs.part(split, 0)
        test = adaptation_scores.TestSet(none, pairs, pairs.places(split, 0), recalls)
        lexicon = Lexicon(half.texts)
        alone, with_idf = (grouped(row.values[:, 0], row.answers) for row in score_encoder(half, start, lexicon))
        bm25, idf = (grouped(row.values[:, 0], row.answers) for row in score_lexical(half, lexicon))
        assert test.num_rows("pairs") == len(half.queries)
        real = TransformerEncoder.windows
        with patch.object(TransformerEncoder, "windows", autospec=True, side_effect=real) as windows:
            assert np.array_equal(test.encoder(start)["pairs"], alone)
            assert np.array_equal(test.encoder(start, 1.0)["pairs"], with_idf)
        cut += [len(call.args[1]) for call in windows.mock_calls]
        assert [row["pairs"].tolist() for row in test.lexical().values()] == [bm25.tolist(), idf.tolist()]
    assert cut == [len(pairs.texts)]


def test_most_documents_are_the_first_by_key_if_all_are_long_and_long_ones_first():
    keys = np.random.default_rng(0).permutation(1000).astype(np.uint64)
    assert keys[_select(keys, np.ones(1000, np.bool_), 500)].tolist() == list(range(500))
    long = keys % 4 == 0
    assert keys[_select(keys, long, 200)].tolist() == list(range(0, 800, 4))
    assert keys[_select(keys, long, 260)].tolist() == sorted({*range(0, 1000, 4), 1, 2, 3, 5, 6, 7, 9, 10, 11, 13})
    assert keys[_select(keys, long, 2000)].tolist() == list(range(1000))


def test_adapt_refuses_what_it_cannot_use_before_any_work(encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "mine" / "encoder")
    short = shutil.copytree(encoder, tmp_path / "short")
    BertForMaskedLM(BertConfig.from_pretrained(encoder, max_position_embeddings=40)).save_pretrained(short)
    (tmp_path / "sts-test.csv").write_text("a\tb\tc\t1\t3.5\tone\tother\n" * 99)
    pairs = str(write_pairs(tmp_path / "pairs.jsonl", 150))
    (docs := tmp_path / "docs").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    corpus(docs / "long.jsonl", 3, words=400)
    corpus(tmp_path / "tiny.jsonl", 30, words=20)
    passages = jsonl(tmp_path / "passages.jsonl", [{"text": f"words {n}", "document": n // 2} for n in range(8)])
    for start, output, settings, words in (
        (encoder, "out", {"pairs": pairs}, ("--pairs", "different answers are left", "100", "240")),
        (encoder, "out", {"pairs": pairs, "train_on_pairs": True}, ("--pairs", "370")),
        (encoder, "out", {"train_on_pairs": True}, ("--train-on-pairs", "--pairs FILE")),
        (encoder, "out", {"pairs": pairs, "train_on_pairs": True, "steps": 0}, ("--train-on-pairs", "--steps 0")),
        (encoder, "out", {"passages": pairs}, ("CORPUS", "--passages", "one of the two")),
        (encoder, "out", {"corpus": []}, ("CORPUS", "--passages", "one of the two")),
        (encoder, "out", {"corpus": [], "passages": pairs, "format": "jsonl"}, ("--format", "columns")),
        (encoder, "out", {"corpus": [], "passages": pairs}, ("has no column document", "query, text")),
        (encoder, "out", {"stsb": tmp_path}, ("--stsb", "99 pairs", "100")),
        (encoder, "mine", {}, ("--output", "encoder", "another folder")),
        (short, "out", {}, ("--passage-tokens 62: at most 38", "reads 40 with 2", "longer texts")),
        (short, "out", {"corpus": [], "passages": passages}, ("--passage-tokens 62: at most 38",)),
        (encoder, "out", {"passage_tokens": 200}, ("--passage-tokens 200: at most 98", "100 with 2", "lower it")),
        (encoder, "out", {"corpus": tmp_path / "tiny.jsonl"}, ("none of 30", "limit is 128", "join")),
        (encoder, "out", {"corpus": tmp_path / "typo.jsonl"}, ("CORPUS", "typo.jsonl", "no such file")),
        (encoder, "out", {"text_field": ["body"]}, ("--text-field", "body", "long.jsonl")),
        (encoder, "docs", {}, ("--output", "holds long.jsonl", "new folder")),
        (encoder, "docs/out", {}, ("--output", "inside the input", "another folder")),
        (encoder, "docs/out", {"corpus": docs / "**/*.md"}, ("--output", "inside the input", "another folder")),
        (tmp_path / "run", "out", {}, ("run is a run", "name the folder `export`")),
        (docs, "out", {"corpus": encoder}, (f"{encoder} is an encoder", "comes first", "ENCODER CORPUS")),
        (docs / "long.jsonl", "out", {}, ("long.jsonl is a file", "encoder")),
    ):
        with pytest.raises((UsageError, ConfigError), match=all_of(*words)):
            adapt(start, settings.pop("corpus", docs), tmp_path / output, **settings)
        assert (tmp_path / output).exists() == (output in ("mine", "docs"))
        assert not (tmp_path / output / "data").exists()
        assert not (tmp_path / output / "state.json").exists()
    assert (tmp_path / "mine" / "encoder" / "config.json").is_file()


def test_an_output_of_adapt_is_no_encoder_but_may_hold_one(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(EncoderError, match="adaptation without a better encoder"):
        load_encoder(tmp_path)
    (tmp_path / "encoder").mkdir()
    with pytest.raises(EncoderError, match=f"name its encoder: {tmp_path}/encoder"):
        load_encoder(tmp_path)


def test_adapt_refuses_all_poor_inputs_at_once(tmp_path, capsys):
    (tmp_path / "pairs.csv").write_text("question,answer\na,b\n")
    output = tmp_path / "pairs.csv" / "out"
    options = ["--pairs", str(tmp_path / "pairs.csv"), "--stsb", str(tmp_path), "--output", str(output)]
    assert main(["adapt", str(tmp_path), str(tmp_path), *options]) == 1
    errors = capsys.readouterr().err
    for words in ((tmp_path, "is no encoder"), ("query", "text"), ("sts-test.csv",)):
        says(errors, *words)
    assert f"--output {output}: " in errors


def lower_casing(encoder, folder, normalizer):
    """The encoder as a folder of sentence-transformers that lower-cases texts, its tokenizer with a normaliser."""
    limited(encoder, folder)
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits | {"do_lower_case": True}))
    engine = Tokenizer.from_file(str(folder / "tokenizer.json"))
    engine.normalizer = normalizer
    engine.save(str(folder / "tokenizer.json"))
    return folder


LOWER, SAME = normalizers.Lowercase(), normalizers.NFC()


@pytest.mark.parametrize(
    "normalizer", [LOWER, normalizers.BertNormalizer(lowercase=True), normalizers.Sequence([LOWER, SAME])]
)
def test_encoder_that_lower_cases_twice_has_the_tokenizer_of_its_file(encoder, tmp_path, normalizer):
    folder = lower_casing(encoder, tmp_path / "start", normalizer)
    start = load_transformer(str(folder))
    assert fingerprint(start.tokenizer) == fingerprint(AutoTokenizer.from_pretrained(folder))
    assert np.array_equal(*start.encode(["WORD1 Word2", "word1 word2"]))


@pytest.mark.parametrize("normalizer", [SAME, normalizers.BertNormalizer(lowercase=False)])
def test_adapt_of_an_encoder_that_alone_lower_cases_is_refused_before_any_work(encoder, tmp_path, normalizer):
    folder = lower_casing(encoder, tmp_path / "start", normalizer)
    corpus(tmp_path / "docs.jsonl", 3, words=400)
    assert np.array_equal(*load_transformer(str(folder)).encode(["WORD1 Word2", "word1 word2"]))
    with pytest.raises(UsageError, match=all_of("do_lower_case", "Lowercase", "tokenizer.json")):
        adapt(folder, tmp_path / "docs.jsonl", tmp_path / "out")
    assert not (tmp_path / "out" / "data").exists()


def test_settings_of_the_file_are_those_of_an_adaptation():
    config = AdaptConfig(encoder="models/x", corpus=["-"], seed=7)
    assert config.prepare_config(Path("data")).geometry.max_tokens == 64
    train = config.train_config(Path("data"), Path("run"), 10, "cls", ("query: ", "passage: "))
    assert (train.encoder.query_prompt, train.encoder.prompt) == ("query: ", "passage: ")
    assert (train.spans.strategy, train.objective.terms, train.optim.lr) == ("distant", "contrastive", 5e-5)
    longer = config.model_copy(update={"passage_tokens": 254})
    assert longer.prepare_config(Path("data")).geometry.max_tokens == 256
    spans = longer.train_config(Path("data"), Path("run"), 10, "cls", ("", "")).spans
    assert (spans.min_tokens, spans.max_tokens, spans.query_tokens) == (128, 256, (4, 24))
    shorter = config.model_copy(update={"passage_tokens": 30}).train_config(
        Path("data"), Path("run"), 10, "cls", ("", "")
    )
    assert (shorter.spans.min_tokens, shorter.spans.query_tokens) == (16, (4, 16))
    assert (train.batch_documents, train.steps, train.epochs, train.seed) == (64, 10, None, 7)
    assert (train.export, train.validation.every_steps, train.encoder.pooling) == ("last", 0, "cls")


def test_messages_of_a_preparation_name_options():
    counts = Counts(read=50, kept=48, dropped={}, failed={"invalid_utf8": 2}, text_bytes=9, longest_tokens=9)
    failed = as_options(too_many_failed(counts, [], 0.01, "documents", Losses()))
    says(
        failed,
        "4.00% is more than 1%. Repair the inputs (write them in UTF-8) and name another --output",
        "with --skip-bad. Examples",
    )
    settings = AdaptConfig(encoder="e", corpus=["c"], skip_bad=True).prepare_config(Path("data"))
    assert settings.max_error_rate == 1
    other = "output = '/m/adapted/data': was made with other settings"
    assert as_options(other) == "--output '/m/adapted': was made with other settings"
    assert as_options("tokenizer.name = '/m': was changed") == "ENCODER '/m': was changed"
    assert as_options("check corpus.paths and corpus.format") == "check CORPUS and --format"
    assert as_options("check corpus.paths = ['a']") == "check CORPUS ['a']"


def test_a_better_encoder_ends_with_the_commands_that_search_with_it(encoder, tmp_path, capsys):
    documents = corpus(tmp_path / "my documents.jsonl", 3)
    documents.write_text(documents.read_text().replace('"text"', '"my text"'))
    verdict = adaptation_scores.Verdict("better", Comparison(0.4, 0.5, 120, (0.05, 0.15)))
    place = tmp_path / "out" / "encoder"
    result = Result(verdict, "better", TRAINED, "distant", [], "", None, 1, place)
    result.facts.update(words_weight=0.75, failed=1)
    with patch("declutr.adaptation.job.adapt", return_value=result):
        words = ["adapt", str(encoder), str(documents), "--output", str(tmp_path / "out"), "--format", "jsonl"]
        assert main([*words, "--text-field", "my text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    says(lines, f"next: declutr embed {place} '{documents}' --output texts.parquet --passages", "--format jsonl")
    says(lines, "--text-field 'my text' --skip-bad")
    says(lines, "declutr index texts.parquet --output texts.index --hybrid --weight 0.75")
