"""The benchmarks run for real on tiny models: keys and equality, never times."""

import gzip
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import cpukernel  # noqa: F401 - registers the kernels
import numpy as np
import pytest
import ray
import torch
from messages import all_of, says
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import memory
from benchmarks.evaluate import embed
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import repeat
from benchmarks.prepare import __main__ as prepare
from benchmarks.scale import __main__ as scale
from benchmarks.scale import shards
from benchmarks.step import __main__ as step
from benchmarks.step import batch, feed, sharding
from benchmarks.workload import models, packed, texts
from declutr.pipeline.shards.schema import shard_schema
from declutr.pipeline.shards.shards import ShardSet, check_shards
from declutr.pipeline.shards.windows import Geometry, window_starts
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.data.plan import permute
from declutr.trainer.model import flops, kernels
from declutr.trainer.model.kernel_choice import Kernels
from declutr.trainer.objectives.span_config import SpanConfig

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.slow
def test_benchmark_of_batches_has_figures(tmp_path):
    found = figures(batch.main, tmp_path, *TINY, "--sizes", "2", "8", "--microbatch-tokens", "100")
    assert found["peak_mib"].keys() == {"2", "8"}
    assert all(peak > 0 for peak in found["peak_mib"].values())
    assert found["ratio_4096_to_64"] is None
    assert found["sizes"]["8"]["microbatches"] > found["sizes"]["2"]["microbatches"] > 1
    assert found["grad_rel_diff"] < 1e-4
    for size in ("2", "8"):
        one = found["sizes"][size]
        assert one["embedding_state_mib"] >= one["span_embeddings_mib"]


@pytest.mark.dist
def test_benchmark_of_sharding_has_figures(tmp_path):
    tiny = ["--model", "tiny", "--spans", "8", "24", "--documents", "3", "--steps", "2"]
    found = figures(sharding.main, tmp_path, *tiny, "--processes", "2")
    assert 0.49 < found["kept_ratio"] < 0.52
    assert found["loss_abs_diff"] < 1e-4
    assert found["time_ratio_median"] > 0
    assert [rank["tokens"] > 0 for rank in found["ranks"]] == [True, True]


def test_benchmark_of_embedding_has_figures(tmp_path):
    counts = ["--num-sentences", "60", "--num-paragraphs", "3", "--vocab-size", "500", "--rounds", "1"]
    found = figures(embed.main, tmp_path, "--model", "tiny", "--device", "cpu", *counts)
    assert found["sentences"]["texts"] == 60
    assert found["max_abs_diff"] < 1e-5
    assert found["ratio"] == min(found["ratio_sentences"], found["ratio_paragraphs"]) > 0
    assert min(map(len, embed.paragraphs_of(["A sentence."], 2))) >= 2400


def test_benchmark_of_the_collator_has_figures(tmp_path):
    found = figures(feed.main, tmp_path, "--documents", "2", "--seconds", "0.01")
    assert found["tokens_per_second_per_core"] == found["paper_spans"]["tokens_per_second_per_core"] > 0
    assert found["short_spans"]["tokens_per_step"] < found["paper_spans"]["tokens_per_step"]


@pytest.mark.ray
def test_benchmark_of_scale_has_figures(tmp_path):
    """Small, but every part; every figure says what it is worth."""
    sizes = ("--documents", "20000", "--ranks", "16", "--shards", "40", "--batch", "256", "--sample", "300")
    few = ("--chunks", "1", "--rows", "32", "64", "--model", "tiny", "--tasks", "10", "--groups", "2")
    found = figures(scale.main, tmp_path, *sizes, *few)
    assert not ray.is_initialized()
    parts = [found[name] for name in ("plan", "manifest", "loss", "checkpoint", "ray")] + [*found["control"].values()]
    kinds = {one["kind"] for part in parts for one in part.values() if "kind" in one}
    assert kinds == {"measured", "computed", "assumed"}
    assert found["manifest"]["shards"] | {"value": 40, "how": "20000 documents"} == found["manifest"]["shards"]
    assert found["checkpoint"]["size"]["value"] == pytest.approx(67750 * 12 / 2**30, rel=1e-3)
    assert found["loss"]["rows"]["value"] == 1024
    assert found["control"]["heartbeats"]["hosts_calls"]["value"] == 2 * 2 / 0.5, "two hosts of eight ranks"
    assert found["manifest"]["files_opened_a_step"]["value"] == 0, "40 shards stay open"


def test_the_order_of_a_billion_runs_backwards():
    """Exact where an epoch ends and another begins, too; and the check is able to fail."""
    size = 10**9
    items = np.concatenate([np.arange(500), np.arange(size - 500, size)])
    epochs = np.repeat([1, 0], 500)
    images = permute(7, epochs, items, size)
    assert np.array_equal(permute(7, epochs, images, size, inverse=True), items)
    assert not np.array_equal(permute(8, epochs, images, size, inverse=True), items)


def test_a_wide_folder_is_what_prepare_would_leave(tmp_path):
    shards.make_shards(tmp_path / "wide", 3, 20)
    found = ShardSet(tmp_path / "wide", "train")
    assert found.num_documents == 60
    assert all("ledger" in problem for problem in check_shards(tmp_path / "wide"))
    assert found.take(np.array([59, 0])).column("offset").to_pylist() == [19, 0]


@pytest.mark.slow
def test_needs_neither_ray_nor_data(tmp_path):
    """A whole run in an empty folder, without Ray and sentence-transformers."""
    code = (
        "import sys; sys.modules['ray'] = sys.modules['sentence_transformers'] = None\n"
        "import benchmarks.step.__main__ as step, benchmarks.step.batch, benchmarks.step.feed\n"
        "assert not [name for name in sys.modules if name.startswith('ray.')]\n"
        f"step.main({[*TINY, '--documents', '1', '--steps', '1', '--warm-up', '0']!r})\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True
    )
    assert child.returncode == 0, child.stderr.decode()
    found = json.loads(child.stdout)
    assert found["hardware"]["cores"] >= 1
    assert found["ratio_vs_sentence_transformers"] is None
    assert "not importable" in found["sentence_transformers"]["reason"]


def test_documents_are_shards_rows():
    spans = SpanConfig(min_tokens=8, max_tokens=64)
    table = texts.documents(3, 5, spans, 1000, seed=1)
    assert table.schema.equals(
        shard_schema(1000, Geometry(num_anchors=2, max_tokens=64), "made up"), check_metadata=True
    )
    assert table.slice(2, 2).equals(texts.documents(5, 2, spans, 1000, seed=1))
    lengths = table.column("num_tokens").to_pylist()
    assert min(lengths) >= spans.min_document_tokens
    for row in table.to_pylist():
        assert len(row["tokens"]) == row["num_tokens"]
        assert row["windows"] == window_starts(row["num_tokens"], 64).tolist()
        assert min(row["tokens"]) >= 4
        assert max(row["tokens"]) < 999
    assert len(set(table.column("id").to_pylist())) == 5
    assert not texts.documents(3, 5, spans, 1000, seed=2).equals(table)


def test_flops_of_a_forward_equal_torchs_count():
    """The formula's linear and head terms against torch's own counter; attention, at these sizes, is a few percent."""
    workload = packed.Workload("tiny", SpanConfig(min_tokens=20, max_tokens=24), 0)
    made, batch_ = workload.encoder(), workload.batch(0, 2).spans
    with FlopCounterMode(display=False) as counted:
        made(batch_)
    expected = flops.step_flops(made.model, flops.linear_weights(made.model), batch_.lengths, len(batch_.labels)) / 3
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.2)


def test_peaks_of_known_gpus_are_the_published_ones():
    assert flops.peak_flops("NVIDIA H200", half=True) == 989e12
    assert flops.peak_flops("NVIDIA B200", half=True) == 2250e12
    assert flops.peak_flops("NVIDIA L40S", half=True) == 362e12
    assert flops.peak_flops("Some other", half=True) is None
    assert flops.peak_flops(None, half=True) is None


def test_embedding_state_is_what_lives_at_one_time():
    with memory.EmbeddingState({10}, 4) as counted:
        first = torch.ones(10, 4)
        second = first + 1
        del first
        third = second * 2  # two at a time
        torch.ones(11, 4)
        torch.ones(10, 3)
        del second, third
    assert counted.peak_bytes == 2 * 10 * 4 * 4


def test_peak_sees_what_was_freed():
    before = memory.reset_peak(torch.device("cpu"))
    block = torch.ones(64 * 2**20 // 4)
    del block
    assert memory.peak(torch.device("cpu")) - before > 60


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_benchmark_of_prepare_has_figures(tmp_path):
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(200)]
    for name in ("a", "b"):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as stream:
            for length in rng.integers(20, 400, 60):
                stream.write(json.dumps({"text": " ".join(rng.choice(words, length))}) + "\n")
    tokenizer = train_tokenizer([" ".join(words)], 400)
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    arguments = ["--corpus", str(tmp_path / "*.jsonl.gz"), "--tokenizer", str(tmp_path / "tokenizer"), "--rounds", "1"]
    found = figures(prepare.main, tmp_path, *arguments, "--max-tokens", "64")
    assert found["engine"] == "tiktoken"
    assert found["documents"]["read"] == 120
    assert 0 < found["documents"]["kept"] < 120
    assert found["share_of_limit"] > 0
    assert found["peak_rss_mib"] is None or found["peak_rss_mib"] > 50
    # `datasets` kept the same documents and tokens, or there would be no figure.
    assert (found["ratio_vs_datasets"] is None) == (find_spec("datasets") is None)
    assert min(found["with_ray_start"]["mib_per_s"], found["mib_per_s"]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def wrong(*given):
    return 1.5 * kernels.attend(*given)


@pytest.mark.parametrize(
    ("device", "attend", "told"),
    [("cpu", kernels.attend, None), ("cpu", wrong, "differs"), ("cpu:0", kernels.attend, "called 0 times")],
)
def test_gpu_kernel_check_fails_if_the_kernel_is_wrong_or_not_called(monkeypatch, device, attend, told):
    """On the CPU, whose kernel stands for that of a GPU: also if it is kept for another device than that of tensors."""
    workload = packed.Workload("tiny", SpanConfig(max_tokens=20, min_tokens=8), 0)
    monkeypatch.setattr(gpu, "_DEVICE", torch.device(device))

    def encoder(*_, **__):
        made = models.encoder("tiny", 0.0, 0)
        made._kernels[torch.device(device), False] = Kernels(attend)
        return made

    monkeypatch.setattr(gpu, "_encoder", encoder)
    found = gpu.kernel_against_groups(workload, 4)
    assert found["passed"] == (told is None)
    assert told in (None, "differs") or told in found["why"]


def test_a_machine_without_a_gpu_is_told_what_to_do(capsys):
    with pytest.raises(SystemExit, match=all_of("GPU", "torch", "benchmarks.gpu.budget")):
        gpu.main([])
    with pytest.raises(SystemExit, match="no GPU"):
        repeat.main([])
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
    says(capsys.readouterr().err, "kernel", "dropout")
