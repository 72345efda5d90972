"""Checks and measures the trainer on this machine's GPU; the first thing to run on one.

    make gpu
    python -m benchmarks.gpu --json OUT [--model roberta-base] [--documents 16] [--only step]

1. `kernel`, `dropout`: embeddings and gradients of the attention kernel in bfloat16 against those of groups in float32;
   the second with dropped attention weights. Beside them, how far groups in bfloat16 are off.
2. `compiled`: the same for the compiled encoder against the one that is not, with dropout: equal masks on both sides.
3. `syncs`: steps in which any wait for the GPU is an error.
4. `time`: seconds, tokens/s and MFU of a step, and a table and a trace of its kernels; `experimental`: the same with
   `scaling.experimental`, against a step without the setting.
5. `repeat`: whether equal steps have equal bits, with `scaling.deterministic` and without, and the cost (repeat.py).
6. `step`, `embed`: the benchmarks of these names, each with a file of figures next to OUT, measured without
   `scaling.deterministic`, the parts above with it.

The command ends with 1 if a check fails; the figures are written in any case.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.gpu.repeat import repeated
from benchmarks.workload import Workload, add_options, seconds_of_steps
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model.attention import Kernels
from declutr.trainer.model.encoder import Encoder, drops_attention
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import gpu_name, peak_flops, step_flops
from declutr.trainer.worker.device import repeat_bits

_DEVICE = torch.device("cuda", 0)  # as tensors name it: encoders keep their kernels by device
# bfloat16 has 8 bits. Counted on a CPU with 12 layers of the larger weights: 0.018 and 0.038 from float32; without any
# dropped weight, 0.09 and 0.14 from attention that drops them.
_TOLERANCES = {"embeddings": 0.04, "gradients": 0.08}
_LARGER = 3  # factor of new weights, beside whose residual stream attention would hardly show
_LOSS_TOLERANCE = 0.01  # of the loss after the warm-up: copies of weights that follow no step are further off
_WARM_UP, _TIMED, _PROFILED = 5, 20, 3
_CHECKS = ("kernel", "dropout", "compiled", "syncs", "time", "experimental", "repeat")
_BENCHMARKS: dict[str, tuple[str, ...]] = {  # module and options; {} is an option of this command
    "step": ("step", "--device=cuda", "--model={model}", "--documents={documents}", "--compile"),
    "embed": ("embed",),
}


def kernel_against_groups(workload: Workload, documents: int) -> dict[str, Any]:
    """Compare the kernel with groups."""
    encoder = _larger(workload.encoder())
    drops = drops_attention(encoder.model.config)
    kernels = encoder.kernels(_DEVICE, drops)
    if kernels is None or (drops and kernels.attend_dropout is None):
        return {"passed": False, "why": "the kernel does not run on this GPU; the log has the reason"}
    calls = list[str]()
    dropping = kernels.attend_dropout and _counted(kernels.attend_dropout, calls)
    encoder._kernels[_DEVICE, drops] = Kernels(_counted(kernels.attend, calls), dropping)
    with_kernel, used = _values(encoder, workload, documents), len(calls)
    encoder._kernels[_DEVICE, drops] = None
    groups, exact = _values(encoder, workload, documents), _values(encoder, workload, documents, half=False)
    if not used or len(calls) > used:  # groups compared with groups always agree
        return {"passed": False, "why": f"the kernel was called {used} times, and {len(calls) - used} times by groups"}
    return {**_compared(with_kernel, exact), "groups": _compared(groups, exact)}


def _counted(attend: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The kernel, which notes each of its calls."""

    def counted(*arguments: Any) -> Any:
        calls.append(attend.__name__)
        return attend(*arguments)

    return counted


def compiled_against_eager(workload: Workload, documents: int) -> dict[str, Any]:
    """Compare the compiled encoder with the one that is not."""
    eager, compiled = (_values(workload.encoder(mode), workload, documents) for mode in (False, True))
    return _compared(compiled, eager)


def experimental_against_default(workload: Workload, documents: int, folder: Path) -> dict[str, Any]:
    """Compare a batch, and the loss after some steps, with and without `scaling.experimental`, and time its steps."""
    compared = _compared(*(_values(_larger(_encoder(workload, mode)), workload, documents) for mode in (True, False)))
    batch = workload.batch(0, documents)
    steps = [_warm(workload, documents, 0, mode)[0] for mode in (True, False)]
    losses = [train_step.begin({"": batch}, _WARM_UP + 1).read().loss for train_step in steps]
    figures = {**timed(workload, documents, folder, experimental=True), **compared, "losses": losses}
    return figures | {"passed": compared["passed"] and abs(losses[0] / losses[1] - 1) <= _LOSS_TOLERANCE}


def _larger(encoder: Encoder) -> Encoder:
    """The encoder with larger weights."""
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(_LARGER if parameter.dim() > 1 else 1)
    return encoder


def _encoder(workload: Workload, experimental: bool) -> Encoder:
    encoder = workload.encoder(compiled=True)
    encoder.experimental = experimental
    return encoder


def _warm(
    workload: Workload, documents: int, count: int, experimental: bool = False
) -> tuple[TrainStep, list[RankBatch]]:
    """A compiled train step after its warm-up, and the batches of the next steps."""
    train_step = workload.train_step(_encoder(workload, experimental), late=True)
    batches = [workload.batch(step * documents, documents) for step in range(_WARM_UP + count)]
    for step, batch in enumerate(batches[:_WARM_UP], start=1):
        train_step.begin({"": batch}, step).read()
    return train_step, batches[_WARM_UP:]


def without_syncs(workload: Workload, documents: int) -> dict[str, Any]:
    """Take steps in which a wait for the GPU is an error."""
    train_step, batches = _warm(workload, documents, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [train_step.begin({"": batch}, _WARM_UP + 1) for batch in batches]
    except RuntimeError as error:
        return {"passed": False, "why": str(error)}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"passed": True, "loss": pending[-1].read().loss}


def timed(workload: Workload, documents: int, folder: Path, experimental: bool = False) -> dict[str, Any]:
    """Time steps, and write a table and a trace of their kernels."""
    train_step, batches = _warm(workload, documents, _TIMED, experimental)
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of_steps(train_step, batches, first=_WARM_UP + 1)
    with torch.profiler.profile() as profile:
        for batch in batches[-_PROFILED:]:
            train_step.begin({"": batch}, 1)
        torch.cuda.synchronize()  # else the profile lacks kernels that still run
    folder.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(folder / "trace.json"))
    table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30)
    (folder / "kernels.txt").write_text(table, encoding="utf-8")
    packed = [batch.spans for batch in batches]
    model = train_step.encoder.model
    flops = sum(step_flops(model, spans.lengths, len(spans.labels)) for spans in packed)
    tokens, peak = sum(spans.num_tokens for spans in packed), peak_flops(gpu_name(_DEVICE), half=True)
    return {
        "passed": True,
        "seconds": round(statistics.median(seconds), 5),
        "tokens_per_second": round(tokens / sum(seconds), 1),
        "mfu": None if peak is None else round(flops / sum(seconds) / peak, 4),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def _values(encoder: Encoder, workload: Workload, documents: int, half: bool = True) -> list[torch.Tensor]:
    """Embeddings of a batch, and the gradient of their sum with that of the MLM loss."""
    batch = workload.batch(0, documents).spans
    encoder.zero_grad(set_to_none=True)
    with torch.autocast(_DEVICE.type, dtype=torch.bfloat16, enabled=half):
        embeddings, mlm = encoder(batch)
    (embeddings.square().sum() + mlm).backward()
    gradients = [parameter.grad.float() for parameter in encoder.parameters() if parameter.grad is not None]
    return [embeddings.detach(), torch.cat([gradient.flatten() for gradient in gradients])]


def _compared(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, Any]:
    pairs = zip(_TOLERANCES, actual, expected, strict=True)
    differences = {name: float((value - other).norm() / other.norm()) for name, value, other in pairs}
    return {"passed": all(differences[name] <= tolerance for name, tolerance in _TOLERANCES.items()), **differences}


def _benchmark(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run another benchmark in a process; its figures are in the folder."""
    torch.cuda.empty_cache()  # the other process needs the memory
    module, *arguments = (part.format(**vars(options)) for part in _BENCHMARKS[name])
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(folder / f"{name}.json")]
    ended = subprocess.run(command, check=False)
    return {"passed": ended.returncode == 0, "exit": ended.returncode}


def main(arguments: list[str] | None = None) -> None:
    """Check, measure, print and write."""
    parser = record.parser("gpu", __doc__)
    add_options(parser, "roberta-base", 16, (32, 512))
    parser.add_argument("--only", nargs="+", choices=[*_CHECKS, *_BENCHMARKS], help="parts to run; default: all")
    options = record.parse(parser, arguments)
    if not torch.cuda.is_available():
        sys.exit(
            f"no GPU: torch {torch.__version__} finds no CUDA device. Run this on a machine with an NVIDIA GPU, and "
            "install a build of torch for CUDA: make setup TORCH=torch"
        )
    repeat_bits()  # as the trainer does
    folder = options.json.with_suffix("") if options.json else Path("runs/gpu")
    parts = {name: part for name, part in _parts(options, folder).items() if not options.only or name in options.only}
    results: dict[str, Any] = {}
    for name, part in parts.items():
        record.progress(f"{name} ...")
        try:
            results[name] = part()
        except RuntimeError as error:  # of torch: too little memory, or an operation that cannot repeat its bits
            results[name] = {"passed": False, "why": str(error).partition("\n")[0]}
        record.progress(f"{name}: {results[name]}")
    figures = {"benchmark": "gpu", "model": options.model, "documents": options.documents}
    record.publish({**figures, "mfu": results.get("time", {}).get("mfu"), **results}, options)
    if failed := [name for name, part in results.items() if not part["passed"]]:
        sys.exit(f"failed: {', '.join(failed)}")


def _parts(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    dropping = Workload.of(options, "cuda", "bf16", dropout=0.1, attention_dropout=0.0)
    plain = Workload.of(options, "cuda", "bf16", dropout=0.0)
    with_attention_dropout = Workload.of(options, "cuda", "bf16", dropout=0.1, attention_dropout=0.1)
    return {
        "kernel": lambda: kernel_against_groups(plain, options.documents),
        "dropout": lambda: kernel_against_groups(with_attention_dropout, options.documents),
        "compiled": lambda: compiled_against_eager(dropping, options.documents),
        "syncs": lambda: without_syncs(dropping, options.documents),
        "time": lambda: timed(dropping, options.documents, folder),
        "experimental": lambda: experimental_against_default(dropping, options.documents, folder / "experimental"),
        "repeat": lambda: repeated(options),
        **{name: lambda name=name: _benchmark(name, options, folder) for name in _BENCHMARKS},  # type: ignore[misc]
    }


if __name__ == "__main__":
    main()
