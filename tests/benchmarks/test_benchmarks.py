"""The benchmarks run for real on tiny models: keys and equality, never times."""

import gzip
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import cpukernel  # noqa: F401 - registers the kernels
import numpy as np
import pytest
import torch
from messages import all_of, says
from processes import ROOT

from benchmarks import embed, step, workload
from benchmarks.adapt import main
from benchmarks.gpu import __main__ as gpu
from declutr.pipeline.shards.windows import Geometry, window_starts
from declutr.pipeline.shards.writer import shard_schema
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.model import attention as kernels
from declutr.trainer.model.attention import Kernels
from declutr.trainer.objectives.config import SpanConfig

FACTS = {"hardware", "versions", "commit", "command"}
TINY = ["--model", "tiny", "--device", "cpu", "--spans", "8", "24"]


def figures(main, tmp_path, *arguments):
    path = tmp_path / "figures.json"
    main([*arguments, "--json", str(path)])
    found = json.loads(path.read_text())
    assert found.keys() >= FACTS
    assert found["versions"]["torch"] == torch.__version__
    return found


def test_benchmark_of_a_step_has_figures(tmp_path):
    """Equality is measured in float32 and float64 without dropout, whatever is timed."""
    timed = ("--dropout", "0.1", "--precision", "bf16")
    found = figures(step.main, tmp_path, *TINY, *timed, "--documents", "2", "--steps", "2", "--warm-up", "0")
    assert (found["device"], found["model"], found["documents"]) == ("cpu", "tiny", 2)
    assert (found["precision"], found["dropout"]) == ("bf16", 0.1)
    assert found["loss_abs_diff"] < 1e-5
    # Weights fresh from the seed give embeddings that nearly coincide, and the loss's gradient cancels most digits.
    assert found["grad_rel_diff"] < 1e-4
    assert found["grad_rel_diff_float64"] < 1e-10
    assert found["padding_share"] == 0
    assert 0 < found["padding_share_released"] < 1
    assert len(found["times"]["ours"]) == len(found["times"]["released"]) == len(found["ratios"]) == 2
    low, high = found["ratio_range"]
    assert 0 < low <= found["ratio_median"] <= high
    assert found["ratio_vs_sentence_transformers"] > 0
    assert found["mfu"] is None


def test_benchmark_of_embedding_has_figures(tmp_path):
    counts = ["--num-sentences", "60", "--num-paragraphs", "3", "--vocab-size", "500", "--rounds", "1"]
    found = figures(embed.main, tmp_path, "--model", "tiny", "--device", "cpu", *counts)
    assert found["sentences"]["texts"] == 60
    assert found["max_abs_diff"] < 1e-5
    assert found["ratio"] == min(found["ratio_sentences"], found["ratio_paragraphs"]) > 0
    assert min(map(len, embed.paragraphs_of(["A sentence."], 2))) >= 2400


def test_documents_are_shards_rows():
    spans = SpanConfig(min_tokens=8, max_tokens=64)
    table = workload.documents(3, 5, spans, 1000, seed=1)
    schema = shard_schema(1000, Geometry(num_anchors=2, max_tokens=64), "made up")
    assert table.schema.equals(schema, check_metadata=True)
    assert table.slice(2, 2).equals(workload.documents(5, 2, spans, 1000, seed=1))
    assert min(table.column("num_tokens").to_pylist()) >= spans.min_document_tokens
    for row in table.to_pylist():
        assert len(row["tokens"]) == row["num_tokens"]
        assert row["windows"] == window_starts(row["num_tokens"], 64).tolist()
        assert 4 <= min(row["tokens"]) <= max(row["tokens"]) < 999
    assert len(set(table.column("id").to_pylist())) == 5
    assert not workload.documents(3, 5, spans, 1000, seed=2).equals(table)


@pytest.mark.nightly
@pytest.mark.ray
def test_benchmark_of_prepare_has_figures(tmp_path):
    """120 documents in two files, of which the second repeats a long and a short one of the first, and a tokenizer.

    As a command, whose functions are of `__main__`, which `datasets` sends to its processes otherwise.
    """
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(200)]
    texts = [" ".join(rng.choice(words, length)) for length in [400, 20, *rng.integers(20, 400, 116)]]
    texts += [texts[0].replace(" ", "\n"), texts[1]]
    for name, part in (("a", texts[:60]), ("b", texts[60:])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in part)
    train_tokenizer([" ".join(words)], 400).save_pretrained(str(tmp_path / "tokenizer"))
    words = ["--corpus", str(tmp_path / "*.jsonl.gz"), "--tokenizer", str(tmp_path / "tokenizer"), "--max-tokens", "64"]

    def run(arguments):
        subprocess.run([sys.executable, "-m", "benchmarks.prepare", *arguments], cwd=ROOT, check=True)

    found = figures(run, tmp_path, *words, "--rounds", "1")
    assert found["engine"] == "tiktoken"
    assert 0 < found["documents"]["kept"] < found["documents"]["read"] == 120
    assert found["share_of_limit"] > 0
    # `datasets` kept the same documents and tokens, or there would be no figure.
    assert (found["ratio_vs_datasets"] is None) == (find_spec("datasets") is None)
    assert found["mib_per_s"] > 0


def wrong(*inputs):
    return 1.5 * kernels.attend(*inputs)


@pytest.mark.parametrize(
    ("device", "attend", "told"),
    [("cpu", kernels.attend, None), ("cpu", wrong, "differs"), ("cpu:0", kernels.attend, "called 0 times")],
)
def test_gpu_kernel_check_fails_if_the_kernel_is_wrong_or_not_called(monkeypatch, device, attend, told):
    """On the CPU, whose kernel stands for that of a GPU: also if it is kept for another device than that of tensors."""
    monkeypatch.setattr(gpu, "_DEVICE", torch.device(device))

    class WithKernel(workload.Workload):
        def encoder(self, compiled=False):
            encoder = super().encoder(compiled)
            encoder._kernels[torch.device(device), False] = Kernels(attend)
            return encoder

    found = gpu.kernel_against_groups(WithKernel("tiny", SpanConfig(max_tokens=20, min_tokens=8), 0), 4)
    assert found["passed"] == (told is None)
    assert told in (None, "differs") or told in found["why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_or_a_corpus_is_told_what_to_do(capsys, tmp_path):
    with pytest.raises(SystemExit, match=all_of("GPU", "torch", "make setup")):
        gpu.main([])
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
    says(capsys.readouterr().err, "kernel", "dropout")
    with pytest.raises(SystemExit):
        main(["--start", str(tmp_path)])
    assert "--corpus" in capsys.readouterr().err


def test_benchmarks_that_make_gpu_starts_exist_with_their_options(capsys):
    for module, *arguments in gpu._BENCHMARKS.values():
        with pytest.raises(SystemExit):
            import_module(f"benchmarks.{module}").main(["--help"])
        assert {argument.partition("=")[0] for argument in arguments} <= set(capsys.readouterr().out.split())
