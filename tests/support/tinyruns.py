"""Real runs for tests: a tiny corpus, tiny configurations, commands in processes of their own, and killing them."""

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import yaml
from prepared import Row, write_prepared
from processes import ROOT as ROOT
from processes import environment, until

from declutr.common.errors import ConfigError
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.checks import load_problems, resolve
from declutr.trainer.run import RunPlan

GEOMETRY = {"num_anchors": 2, "max_tokens": 16}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
FROM_CONFIG = {"model_type": "roberta", **_SIZES, "max_position_embeddings": 24}
_SECTIONS = {
    "encoder": {"from_config": FROM_CONFIG, "dropout": 0.0},
    "spans": {"num_anchors": 2, "num_positives": 2, "min_tokens": 4, "max_tokens": 16},
    "optim": {"lr": 0.001},
    "validation": {"every_steps": 0, "max_documents": 40},
    "checkpoint": {"every_steps": 1000, "every_seconds": None},
    "scaling": {"num_workers": 1, "device": "cpu", "data_cpus": 1},
}
FINISHED = {"encoder": {"dropout": 0.1}, "steps": 8, "validation": {"every_steps": 2}}
FINISHED["checkpoint"] = {"every_steps": 2, "keep_last": 2}


def write_corpus(path, documents=320, seed=0, words=(60, 140)):
    """JSON lines of random words that share a topic within a document, so many of them each."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 6))) for _ in range(300)]
    with path.open("w") as stream:
        for number in range(documents):
            topic = rng.sample(vocabulary, 40)
            text = " ".join(rng.choice(topic) for _ in range(rng.randint(*words)))
            stream.write(json.dumps({"text": f"{text} {number}"}) + "\n")


def prepare_values(corpus, output, **changes):
    values = {"output": str(output), "corpus": {"kind": "files", "paths": [str(corpus)]}, "geometry": GEOMETRY}
    values |= {"tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1}, "session": {"num_cpus": 1}}
    return values | {"validation_fraction": 0.2, "unit_mib": 0.05, "record_batch_rows": 20} | changes


def train_values(data, run, **changes):
    """The `train` section of a tiny run; sections in `changes` are merged, everything else is replaced."""
    values = {"run": str(run), "data": data if isinstance(data, list) else str(data), "batch_documents": 8, "steps": 6}
    return _merged(values | _SECTIONS, changes)


def _merged(values, changes):
    for key, value in changes.items():
        merge = isinstance(value, dict) and isinstance(values.get(key), dict)
        values[key] = values[key] | value if merge else value
    return values


def least_config(**changes):
    values = {"run": "r", "data": "d", "encoder": {"from_config": {"model_type": "roberta"}}}
    return TrainConfig.model_validate(values | changes)


def train_config(data, run, **changes):
    return TrainConfig.model_validate(train_values(data, run, **changes))


def span_validator(config, encoder, vocabulary):
    import torch

    from declutr.pipeline.shards.shards import ShardSet
    from declutr.trainer.build import build_objective, max_content
    from declutr.trainer.objectives.base import HeldOutSplit
    from declutr.trainer.parallel.communicator import Communicator

    held_out, room = ShardSet(Path(config.data), "held-out"), max_content(encoder, vocabulary)
    objective = build_objective(config.main, encoder, held_out.manifest.short_documents)
    settings = room, config.validation.max_documents, Communicator(), torch.device("cpu")
    return objective.validator(HeldOutSplit(held_out, vocabulary, *settings))


def finished_config(data, run, **changes):
    return TrainConfig.model_validate(_merged(train_values(data, run, **FINISHED), changes))


def state_of(step, **scores):
    return RunState(step=step, documents=step, world_size=1, config_hash="c", data_hash="d", scores=scores, files={})


def commands_of(page):
    lines = [line for line in page.splitlines() if line.startswith("    declutr ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def write_config(path, **sections):
    path.write_text(yaml.safe_dump(sections))
    return path


def command(module, config, *overrides):
    """Arguments of a real command, in a process group of its own, where Ray shows its process titles to us."""
    env = environment(PYTHONWARNINGS="ignore", DECLUTR_LOG="INFO")
    place = {"cwd": config.parent, "env": env, "start_new_session": True, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {"args": [sys.executable, "-m", module, str(config), *overrides], **place, **pipes}


def run_command(module, config, *overrides, timeout=150):
    return subprocess.run(**command(module, config, *overrides), timeout=timeout, check=False)


def resolved(config, folder=None):
    return replace(RunPlan.of(config), config=config, folder=Path(folder or config.run))


def problems(config):
    try:
        return load_problems(resolve(config))
    except ConfigError as error:
        return error.problems


def steps_of(run, kind="step"):
    """The numbers of every step that do not depend on the clock, by step."""
    clock = ("time", "kind", "step", "seconds", "tokens_per_second", "documents_per_second", "data_wait_share")
    clock += ("mfu", "peak_memory_mib")
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == kind]
    assert len({line["step"] for line in steps}) == len(steps), "a step is there twice"
    return {line["step"]: {k: v for k, v in line.items() if k not in clock} for line in steps}


def cut(run, to, last):
    shutil.copytree(run, to)
    shutil.rmtree(to / "export")
    for step in steps_in(to / "checkpoints"):
        if step > last:
            shutil.rmtree(to / "checkpoints" / f"step-{step:08d}")
    assert steps_in(to / "checkpoints")[-1:] == [last], "it would begin again"
    return to


def inode(path):
    return path.stat().st_ino if path.is_file() else None


def start_command(module, config, run):
    before = inode(Path(run) / "metrics.jsonl")
    return subprocess.Popen(**command(module, config)), before


def wait_for_step(process, before, run, step, timeout=90):
    """Waits until a running command has itself written that step: it replaces the metrics file that was there."""
    path = Path(run) / "metrics.jsonl"

    def written():
        assert process.poll() is None, f"ended early: {process.communicate()}"
        return inode(path) not in (None, before) and f'"step": {step},' in path.read_text()

    until(written, f"step {step}", timeout)


def kill_at_checkpoint(options, run, step):
    """Starts a training command by options of Popen, and kills it and its session after that checkpoint."""
    process = subprocess.Popen(**options)
    until((run / "checkpoints" / f"step-{step:08}" / "state.json").is_file, f"checkpoint {step}", 120)
    (driver,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    assert wait_gone([driver.pid]) == {}, "the driver outlives the command"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)  # Ray's agents outlive their session by a minute


def title(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline())
    return None


def descendants(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return {process.pid: title(process.pid) or "" for process in psutil.Process(pid).children(recursive=True)}
    return {}


def wait_gone(pids, timeout=60):
    """Waits until none of these processes is left; returns those that are, with their titles."""
    deadline = time.monotonic() + timeout
    while (left := {pid: title(pid) for pid in pids if title(pid) is not None}) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def word_shards(folder, rows=20, held_out=()):
    """Shards of documents of 90 words, of which there are 50; `held_out` has numbers of rows. Returns the folder."""
    texts = [" ".join(f"word{(3 * row + place) % 50}" for place in range(90)) for row in range(rows)]
    unit = [Row(text, "held-out" if row in held_out else "train") for row, text in enumerate(texts)]
    write_prepared(folder, [unit], geometry=GEOMETRY)
    return folder
