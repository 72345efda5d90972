"""MTEB runs on an exported folder as it is: a task on local data, through MTEB's own loader and evaluator."""

import numpy as np
import pytest
from folders import encoder_folder

from evaluation.encoder import load_encoder

mteb = pytest.importorskip("mteb", reason="pip install declutr-ray[mteb]")
datasets = pytest.importorskip("datasets")

FIRST = ["ab cd", "one two three", "word word 7 and more", "x", "cd ab", "three four"]
SECOND = ["ab cd cd", "seven six", "word 8 and more", "naïve", "cd ab", "four three"]
GOLD = [4.0, 1.0, 3.5, 0.0, 5.0, 2.0]


@pytest.mark.filterwarnings("ignore")
def test_an_sts_task(tmp_path):
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Local(AbsTaskSTS):
        metadata = TaskMetadata(
            name="LocalSTS",
            dataset={"path": "local/sts", "revision": "0"},
            description="six pairs",
            reference=None,
            type="STS",
            category="t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )
        min_score, max_score = 0, 5

        def load_data(self, **_):
            rows = {"sentence1": FIRST, "sentence2": SECOND, "score": GOLD}
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
            self.data_loaded = True

    folder = encoder_folder(tmp_path / "export")
    from sentence_transformers import SentenceTransformer

    model = mteb.SentenceTransformerEncoderWrapper(SentenceTransformer(str(folder), device="cpu"))
    result = mteb.evaluate(model, Local(), cache=None, show_progress_bar=False)
    score = result.task_results[0].scores["test"][0]["cosine_spearman"]
    first, second = (load_encoder(str(folder), device="cpu").encode(texts) for texts in (FIRST, SECOND))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    ranks = [np.argsort(np.argsort(values)) for values in (cosines, np.array(GOLD))]
    assert score == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-6)
