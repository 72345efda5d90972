"""MTEB runs on an exported folder as it is: a task on local data, through MTEB's own loader and evaluator."""

import json
from importlib import import_module

import numpy as np
import pytest
from folders import encoder_folder
from messages import says
from scipy.stats import spearmanr

from declutr.cli.main import main
from declutr.encoders.loading import load_encoder

mteb = pytest.importorskip("mteb", reason="pip install -e '.[mteb]'")
datasets = pytest.importorskip("datasets")

UNKNOWN = ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
UNKNOWN += ("sample_creation", "bibtex_citation")
FIRST = ["ab cd", "one two three", "word word 7 and more", "x", "cd ab", "three four"]
SECOND = ["ab cd cd", "seven six", "word 8 and more", "naïve", "cd ab", "four three"]
GOLD = [4.0, 1.0, 3.5, 0.0, 5.0, 2.0]


@pytest.fixture
def task(monkeypatch):
    """A task that MTEB knows by its name, with its data here."""
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Local(AbsTaskSTS):
        metadata = TaskMetadata(
            name="LocalSTS",
            dataset={"path": "local/sts", "revision": "0"},
            description="six pairs",
            type="STS",
            category="t2t",
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            **dict.fromkeys(UNKNOWN),
        )
        min_score, max_score = 0, 5

        def load_data(self, **_):
            rows = {"sentence1": FIRST, "sentence2": SECOND, "score": GOLD}
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
            self.data_loaded = True

    monkeypatch.setitem(import_module("mteb.get_tasks")._TASKS_REGISTRY, "LocalSTS", Local)
    return Local()


def spearman(encoder):
    first, second = (encoder.encode(texts) for texts in (FIRST, SECOND))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    return spearmanr(cosines, GOLD).statistic


@pytest.mark.filterwarnings("ignore")
def test_evaluate_of_an_mteb_task_writes_its_score(tmp_path, task, capsys):
    """As it is documented: `declutr evaluate ENCODER ... --mteb TASK`."""
    folder, name = encoder_folder(tmp_path / "export"), task.metadata.name
    given = ["--mteb", name, "--output", str(tmp_path / "scores")]
    assert main(["evaluate", str(folder), "hashed-words:8", *given]) == 0
    found = json.loads((tmp_path / "scores/mteb.json").read_text())["encoders"]
    for encoder in (str(folder), "hashed-words:8"):
        assert found[encoder] == {name: pytest.approx(100 * spearman(load_encoder(encoder, device="cpu")), abs=1e-3)}
    assert f"{folder}: LocalSTS" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "gone"), "hashed-words:8", *given]) == 1
    assert capsys.readouterr().err.count("not scored:") == 1
    assert main(["evaluate", "hashed-words:8", "--mteb", "STSBenchmrk"]) == 1
    says(capsys.readouterr().err, "Did you mean", "'STSBenchmark'")


@pytest.mark.filterwarnings("ignore")
def test_revision_by_which_mteb_finds_results_is_of_the_precision_too(model):
    from declutr.evaluation.mteb import MtebEncoder

    exact, half = (load_encoder(model, device="cpu", precision=precision) for precision in ("fp32", "bf16"))
    assert MtebEncoder(exact).mteb_model_meta.revision == exact.fingerprint[:16], "earlier results are found"
    assert MtebEncoder(half).mteb_model_meta.revision != exact.fingerprint[:16]
