"""`declutr adapt`: documents in, a better encoder out, or the reason why not; the same command continues."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError

from declutr.adaptation.candidates import (
    CLOSED,
    FOLDS,
    ORDER,
    RUN,
    TRAINED,
    CandidateBuilder,
    document_prompt,
    load_start,
    prepared_pairs,
    steps_within,
)
from declutr.adaptation.checks import Inputs, check_lengths, checked, own_words
from declutr.adaptation.config import BATCH_DOCUMENTS, DOCUMENTS, ENCODER, AdaptConfig, Lengths, State, opened
from declutr.adaptation.paragraphs import paragraph_pairs
from declutr.adaptation.passages import F64, Split, all_documents, held_out_documents, make_passages
from declutr.adaptation.result import Kind, Result, Row, SearchExample, lost_in_general, search_examples, write
from declutr.adaptation.scores import (
    DISTANT,
    MEANING,
    MIN_FOLDED,
    PAIRS,
    SENTENCES,
    WEIGHTS,
    TestSet,
    Values,
    Verdict,
    choose,
    compared,
    judge,
    merged,
    plain,
    total,
)
from declutr.common.bootstrap import MIN_ROWS, Comparison
from declutr.common.config import load_config
from declutr.common.console.logs import get_logger
from declutr.common.errors import UsageError
from declutr.common.lock import RunLock
from declutr.common.paths import expand, listed
from declutr.common.storage import hash_json, read_json, write_json
from declutr.encoders.protocol import vectors_fingerprint
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.retrieval.compare import IDF
from declutr.evaluation.retrieval.pairs import RetrievalTest
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.outcome import summary
from declutr.pipeline.prepare import prepare
from declutr.pipeline.shards.manifest import load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.model.language_model import prompt_ids

_START, _START_IDF = "start", f"start + {IDF}"
T = TypeVar("T")
Rows = dict[tuple[str, Kind], Values]  # values by name and kind of the row, the start's first
_FITS = "; five fits, each on four fifths of the documents, were judged"
_KEPT_FIT = ", and the encoder is one fit on all of them"


def adapt(
    encoder: str | PathLike[str],
    corpus: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str],
    *,
    address: str | None = None,
    **settings: Any,
) -> Result:
    """Adapts an encoder to documents and judges the result on documents, or queries, that neither trained nor chose it.

    Writes `result.json` and `report.html` to `output`, and `encoder/` if the verdict is "better". The same call
    continues an adaptation that was stopped.

    Args:
        encoder: folder or name of the encoder to start from, a transformer that reads 64 tokens or more.
        corpus: files, folders or globs of documents; [] with `passages`.
        output: folder of everything that is made.
        address: of a Ray cluster.
        settings: the others of `AdaptConfig`: passages, format, text_field, pairs, train_on_pairs, stsb,
            passage_tokens, minutes, steps, seed, private, trust_remote_code.

    Returns:
        The verdict, the table of scores with 95% intervals, and the folder of the encoder (None if it is not better).

    Raises:
        ConfigError: with every problem of the settings, or the corpus cannot be prepared.
        UsageError: the folder is of another adaptation or cannot be written, an input cannot be used, or the documents
            give no covariance.
        EncoderError: the encoder cannot be loaded.
        ShardError, DamagedError: the corpus or the folder cannot be read.
        SessionError: Ray cannot be started.
        TrainingFailedError: the training cannot continue.
        RunStoppedError: the training was stopped by a signal.
        RunLockedError: another command works in the folder.
    """
    values = {"encoder": str(encoder), "corpus": listed(corpus), **settings}
    config, output = load_config(values, "adapt", AdaptConfig).located(), expand(output, "output").absolute()
    is_new = not output.exists()
    try:
        inputs = checked(config, output, address)
        output.mkdir(parents=True, exist_ok=True)
        return _adapt(config, output, address, inputs)
    except (OSError, SafetensorError) as error:  # a full disk, or storage that is not reachable
        if isinstance(error, SafetensorError) and "I/O error" not in str(error):
            raise  # damage has messages of its own
        path = getattr(error, "filename", None) or output  # a file of the user is named by the error itself
        place = f"--output {output}: " if Path(path).is_relative_to(output) else ""
        raise UsageError(f"{place}{error}. What is finished is kept; run the same command to continue") from error
    finally:
        if is_new and output.is_dir() and {path.name for path in output.iterdir()} <= {DOCUMENTS}:
            shutil.rmtree(output)  # a refused encoder or corpus leaves nothing, no texts of the user either


def _adapt(config: AdaptConfig, output: Path, address: str | None, inputs: Inputs) -> Result:
    lost = f"another command has taken over {output}"
    with RunLock(output, lambda: get_logger().error(lost)), opened(config, output) as state:
        start = load_start(config)
        state.check(start.fingerprint)  # candidates in the folder are of this encoder
        return _Adaptation(config, output, address, state, start, *inputs).run()


@dataclass
class _Adaptation:
    """One start of the command."""

    config: AdaptConfig
    output: Path
    address: str | None
    state: State
    start: TransformerEncoder
    pairs: RetrievalTest | None
    own: dict[str, list[str]] | None = None
    weight: float = 0.5  # of the IDF cosine beside the candidate, where no development rows choose it
    start_weight: float = 1.0  # of the IDF cosine beside the start

    @cached_property
    def builder(self) -> CandidateBuilder:
        trained = prepared_pairs(self.config, self.pairs, self.output, self.address) if self.pairs else None
        return CandidateBuilder(self.config, self.output / "data", self.output / "candidates", self.address, trained)

    @cached_property
    def preparation(self) -> PipelineConfig:
        return self.config.prepare_config(self.output / "data", self.address)

    @cached_property
    def primary(self) -> str:
        """The measure that chooses and judges: the user's pairs, else sentences if both halves have enough of them."""
        if self.pairs is not None:
            return PAIRS
        return SENTENCES if min(test.num_rows(SENTENCES) for test in self.sets.values()) >= MIN_ROWS else DISTANT

    @property
    def rows(self) -> str:
        return "documents" if self.pairs is None else "answers"

    def run(self) -> Result:
        self._say("preparing the corpus")
        if self.state.start is None:  # else an earlier start has prepared it
            check_lengths(self.preparation, self.start.tokenizer)
        with own_words():
            manifest = prepare(self.preparation)
        self.state.write(start=self.start.fingerprint)  # until here another corpus may be named
        self._say(summary(manifest, str(self.output / "data")))
        # with pairs, both halves have enough answers, or the closed form alone is tried
        if self.pairs is None and min(test.num_rows(self.primary) for test in self.sets.values()) < MIN_ROWS:
            return self._few()
        few = min(test.num_rows(SENTENCES) for test in self.sets.values())
        why = f", as {few} documents of a part have sentences ({MIN_ROWS} needed)" if self.primary == DISTANT else ""
        self._say(f"{self.primary} chooses and judges{why}: {MEANING[self.primary]}")
        return self._chosen_and_judged(self.sets["development"], self.sets["test"])

    @cached_property
    def sets(self) -> dict[Split, TestSet]:
        """What is scored of each half of the documents that are not trained on."""
        config, pairs, recalls = self.config, self.pairs, dict[str, list[F64]]()
        documents = held_out_documents(self.preparation.corpus, self.output / "data", config.seed, config.lengths)
        tests = self._tests(documents)
        if pairs is None:
            return tests
        queries = {split: pairs.places(split, config.seed, config.train_on_pairs) for split in tests}
        return {split: replace(test, pairs=pairs, own=queries[split], recalls=recalls) for split, test in tests.items()}

    def _tests(self, documents: Mapping[T, Sequence[str]]) -> dict[T, TestSet]:
        """Passages and paragraphs of some parts of the documents."""
        start, lengths = self.start, self.scored_lengths
        paragraphs = paragraph_pairs(documents, start.tokenizer, lengths.passage, self.own)
        prompt = document_prompt(start)
        return {
            part: TestSet(make_passages(texts, start.tokenizer, prompt, lengths, self.own), paragraphs=paragraphs[part])
            for part, texts in documents.items()
        }

    @cached_property
    def scored_lengths(self) -> Lengths:
        """Tokens of the passages that are scored: the user's own are read as far as the encoder reads."""
        if self.own is None:
            return self.config.lengths
        start, tokenizer = self.start, self.start.tokenizer
        others = tokenizer.num_special_tokens_to_add() + len(prompt_ids(tokenizer, document_prompt(start)))
        return Lengths(start.max_tokens - others)

    def _chosen_and_judged(self, development: TestSet, test: TestSet) -> Result:
        """Chooses a candidate by development rows alone, and judges it by test rows alone."""
        weight = self.start_weight = self._weight(development, self.start)
        scored = self._development(development, weight)
        candidates = [name for name in ORDER if name in scored]  # not the start: the verdict alone says "better"
        chosen = choose(candidates, scored, self.primary, self.config.seed)
        encoder = self.builder.load(chosen)
        self.weight = self._weight(development, encoder)
        of_words = f"with {self.weight:g} times the {IDF} (the start {weight:g})"
        self._say(f"chosen on development {self.rows}: {chosen}, {of_words}; scoring all rows on test {self.rows}")
        # counted before the scores: a stop after them is a look, too
        looks = self.state.look(f"{chosen}, {self.state.steps or 0} steps, test {test.digest[:16]}")
        start = self._scored(test, self.start)
        values = {name: self._scored(test, self.builder.load(name)) for name in candidates}
        rows = self._rows(test, weight, start, values)
        rows[f"{chosen} + {IDF}", "hybrid"] = self._scored(test, encoder, self.weight)
        # by one measure: several would be several chances
        verdict = judge(start, values[chosen], self.primary, self.config.seed)
        examples = [] if self.config.private else search_examples(test, self.start, encoder)
        return self._finish(verdict, chosen, encoder, rows, looks, examples)

    def _rows(self, test: TestSet, weight: float, start: Values, candidates: dict[str, Values]) -> Rows:
        rows: Rows = {(_START, "start"): start}
        rows |= {(name, "baseline"): values for name, values in self._baselines(test, weight).items()}
        return rows | {(name, "candidate"): values for name, values in candidates.items()}

    def _development(self, test: TestSet, weight: float) -> dict[str, Values]:
        """Values of the start and of every candidate on development rows, in the order of their cost."""
        self._say("scoring the start and the lexical baselines on development documents")
        scored = {_START: self._scored(test, self.start)}
        for name, values in self._baselines(test, weight).items():
            self._tell(name, scored[_START], values)
        steps = self._steps(test)
        names = ORDER if steps else (CLOSED,)
        for number, name in enumerate(names, 1):
            self._say(f"candidate {number} of {len(names)}: {name}")
            self.builder.make(name, self.start, steps)
            scored[name] = self._scored(test, self.builder.load(name))
            self._tell(name, scored[_START], scored[name])
        return scored

    def _tell(self, name: str, start: Values, values: Values) -> None:
        sentence = compared(start, values, self.config.seed)[self.primary].sentence()
        get_logger().info("%s against the start, %s of development %s: %s", name, self.primary, self.rows, sentence)

    def _baselines(self, test: TestSet, weight: float) -> dict[str, Values]:
        return {**test.lexical(), _START_IDF: self._scored(test, self.start, weight)}

    def _weight(self, test: TestSet, encoder: TransformerEncoder) -> float:
        """The weight of the words beside an encoder with the highest score on development rows; 1 if they are few."""
        weights = WEIGHTS[1:] if test.num_rows(self.primary) >= MIN_ROWS else (1.0,)
        return max(weights, key=lambda weight: total(self._scored(test, encoder, weight), self.primary))

    def _steps(self, test: TestSet | None, of_fold: int = 0) -> int:
        """Steps for which there is time, decided once; 0 if nothing could choose by the rows of `test`, or be trained.

        With the number of documents that each of five fits trains on, the time is that of these and of the last fit.
        """
        documents, fits = of_fold or ShardSet(self.builder.data, "train").num_documents, FOLDS + 1 if of_fold else 1
        few = None
        if test and (rows := test.num_rows(self.primary)) < MIN_ROWS:
            few = f"{rows} development {self.rows}, and a choice needs {MIN_ROWS}"
        elif documents < BATCH_DOCUMENTS:
            few = f"{documents} training documents, and a step takes {BATCH_DOCUMENTS}"
        if few:
            get_logger().warning("there are %s: only the closed form is tried", few)
        if few or self.config.steps == 0:
            return 0
        if decided := self.config.steps or self.state.steps:
            self.state.write(steps=decided)  # once, as a run in the folder refuses other steps
            return decided
        rate = self.builder.tokens_per_second(self.start) / (1 + self.config.train_on_pairs)
        left = self.state.seconds_left / fits
        steps, needed_seconds = steps_within(left, rate, documents, self.config.lengths.window)
        self.state.write(steps=steps or None)  # none are decided again, because there may be more minutes then
        if not steps:
            what = f"--minutes {self.config.minutes:g}: too few for {fits} training{'s' * (fits > 1)} on this machine"
            # a minute more for a busier machine
            minutes = math.ceil((self.state.seconds_used + fits * needed_seconds) / 60) + 1
            get_logger().warning("%s; only the closed form is tried. Give %d or more", what, minutes)
        return steps

    def _few(self) -> Result:
        """One candidate by cross-fitting, for a corpus with fewer than 100 test documents.

        Each document is scored by a fit on four fifths of the documents, without it, among the documents of its fold,
        which its key decides, so chance. There is no choice: rows that choose would be too few.
        """
        documents = all_documents(self.preparation.corpus, self.output / "data", self.config.lengths)
        if (kept := load_manifest(self.output / "data").totals["kept"]) > len(documents):
            get_logger().warning("%d of %d documents are used: the long ones, and some others", len(documents), kept)
        tests = [*self._tests({fold: documents[fold::FOLDS] for fold in range(FOLDS)}).values()]
        counts = {measure: sum(test.num_rows(measure) for test in tests) for measure in (SENTENCES, DISTANT)}
        self.primary = SENTENCES if counts[SENTENCES] >= MIN_FOLDED else DISTANT
        if counts[self.primary] < 10:
            nothing = Comparison(math.nan, math.nan, counts[self.primary], None)
            return self._finish(Verdict("too few documents to tell", nothing, MIN_FOLDED), CLOSED, None, {}, 1, [])
        enough = counts[self.primary] >= MIN_FOLDED  # else no verdict is possible, and five trainings are not worth it
        steps = self._steps(None, len(documents) - math.ceil(len(documents) / FOLDS)) if enough else 0
        name = TRAINED if steps else CLOSED
        self._say(
            f"{len(documents):,} documents: too few for a test of their own; {self.primary} judges ({name}) by five "
            f"fits, each on four fifths of the documents: {MEANING[self.primary]}"
            + ("" if enough else f"; fewer than {MIN_FOLDED} {self.rows} give no verdict")
        )
        look, looks = f"{name}, {steps} steps, test {hash_json([test.digest for test in tests])[:16]}", 1
        folds = list[Rows]()
        for fold, test in enumerate(tests):
            self._say(f"fit {fold + 1} of {FOLDS}")
            others = [text for number, text in enumerate(documents) if number % FOLDS != fold]
            self.builder = self._fit(str(fold), others, name, steps)
            encoder, looks = self.builder.load(name), self.state.look(look)
            rows = self._rows(test, 1.0, self._scored(test, self.start), {name: self._scored(test, encoder)})
            folds.append(rows | {(f"{name} + {IDF}", "hybrid"): self._scored(test, encoder, self.weight)})
        rows = {row: merged([fold[row] for fold in folds]) for row in folds[0]}
        verdict = judge(rows[_START, "start"], rows[name, "candidate"], self.primary, self.config.seed, MIN_FOLDED)
        if better := verdict.outcome == "better":
            self._say("the fit on all documents")
            self.builder = self._fit("all", documents, name, steps)
        fitted, fits = (self.builder.load(name), _FITS + _KEPT_FIT) if better else (None, _FITS)
        return self._finish(verdict, name, fitted, rows, looks, [], fits)

    def _fit(self, fold: str, documents: Sequence[str], name: str, steps: int) -> CandidateBuilder:
        """A candidate of some of the documents, in a folder of their own."""
        builder = self.builder.of_documents(documents, self.output / "folds" / fold)
        builder.make(name, self.start, steps)
        shutil.rmtree(builder.folder / RUN, ignore_errors=True)  # six of them, each with three times the weights
        return builder

    def _finish(
        self,
        verdict: Verdict,
        chosen: str,
        encoder: TransformerEncoder | None,
        rows: Rows,
        looks: int,
        examples: list[SearchExample],
        fits: str = "",
    ) -> Result:
        """Writes the result, the page and, if it is better, the encoder; `fits` says how far it is the judged one."""
        stsb, general = lost_in_general(self.start, encoder, self.config)
        learned_from = ShardSet(self.builder.data, "train").num_documents if encoder is not None or fits else 0
        better, place = verdict.outcome == "better", self.output / ENCODER
        if better:
            general += ". Build indexes again: the embeddings are others."
        seed, min_rows = self.config.seed, verdict.min_rows
        if rows:
            start, hybrid = rows[_START_IDF, "baseline"], rows[f"{chosen} + {IDF}", "hybrid"]
            words = judge(start, hybrid, self.primary, seed, min_rows).sentence(self.rows)
            of_start = "" if better else f" (--weight {self.start_weight:g} for {self.config.encoder})"
            with_words = f"As `declutr index --hybrid --weight {self.weight:g}`{of_start} searches: {words}."
            general = " ".join(filter(None, [with_words, general]))
        totals = load_manifest(self.output / "data").totals
        facts: dict[str, float] = {
            "documents": totals["kept"],
            "failed": totals["failed"],
            "training_documents": learned_from,
            "steps": self.state.steps or 0,
            "words_weight": self.weight if better else self.start_weight,
            "seconds": round(self.state.seconds_used),
        }
        long, kept = self.config.lengths.long, facts["documents"]
        which = f" of {long} tokens or more among {kept:,}" if self.primary == DISTANT and self.own is None else ""
        result = Result(
            verdict=verdict,
            sentence=f"{verdict.sentence(self.rows, which)} ({chosen}; {self.primary} recall@1{fits})",
            chosen=chosen,
            primary=self.primary,
            rows=[
                Row.of(name, kind, rows[_START, "start"], values, seed, min_rows)
                for (name, kind), values in rows.items()
            ],
            general=general,
            stsb=stsb,
            looks=looks,
            encoder=place if better else None,
            examples=examples,
            facts=facts,
            folded=bool(fits),
        )
        write(result, self.output, self.builder.place(chosen), encoder, self.config)
        return result

    def _scored(self, test: TestSet, encoder: TransformerEncoder, weight: float = 0.0) -> Values:
        """Values of an encoder, with words on request, kept so that a later start does not compute them again."""
        path = self.output / "scores" / f"{hash_json([vectors_fingerprint(encoder), test.digest, weight])[:32]}.json"
        if path.is_file():
            # a null becomes NaN again
            return {key: np.array(values, np.float64) for key, values in read_json(path).items()}
        scores = test.encoder(encoder, weight)
        write_json(path, plain(scores))  # scoring takes minutes, and a later start needs it again
        return scores

    def _say(self, what: str) -> None:
        get_logger().info("%s; %.0f minutes left", what, self.state.seconds_left / 60)
