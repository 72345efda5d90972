"""What a start of the group waits for, in words; and what this machine cannot give is refused before Ray starts."""

import os
import signal

import pytest
import tinyruns as runs
import torch
from messages import says

from declutr.trainer.driver.checks import ray_problems
from declutr.trainer.driver.signals import Signals
from declutr.trainer.driver.watchdog import Waiting, oversubscribed
from declutr.trainer.setup.scaling import ScalingConfig


def heartbeat(phase, steps=0, size=4):
    return {"phase": phase, "steps": steps, "size": size}


def test_waiting_names_what_is_missing_and_who_has_started():
    waiting = Waiting(ScalingConfig(num_workers=4), "cuda", {"CPU": 2.0}, began=100.0)
    assert waiting.look([], 109.0) is None
    told = waiting.look([], 110.0)
    says(told, "10 s", "4 workers", "1 CPU(s)", "GPU", "2 CPUs", "0 GPUs")
    assert waiting.look([], 111.0) is None
    says(waiting.look([], 170.5), "70 s", "4")
    says(waiting.look([heartbeat("starting")], 171.0), "1 of 4 workers", "1 loading")
    two = [heartbeat("starting"), heartbeat("data")]
    says(waiting.look(two, 172.0), "2 of 4 workers", "1 waiting", "1 loading")
    assert waiting.look([heartbeat("data", steps=1), heartbeat("data")], 300.0) is None
    assert waiting.look([heartbeat("starting")], 400.0) is None


def test_more_workers_than_cpus_are_named(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    many = (os.cpu_count() or 1) + 1
    says(oversubscribed(ScalingConfig(num_workers=many)), f"scaling.num_workers = {many}", "1 CPU(s)")
    assert oversubscribed(ScalingConfig(num_workers=1)) is None
    assert oversubscribed(ScalingConfig(num_workers=many, address="head:6379")) is None


def test_a_gpu_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    workers = torch.cuda.device_count() + 1
    config = runs.train_config("data", tmp_path, scaling={"device": "cuda", "num_workers": workers})
    (problem,) = ray_problems(config, tmp_path, own_session=True)
    says(problem, "scaling.device = cuda", f"{workers} workers", "GPU")
    auto = runs.train_config("data", tmp_path, scaling={"device": "auto", "num_workers": workers})
    assert ray_problems(auto, tmp_path, own_session=True) == []
    (tmp_path / "summary.json").write_text("{}")
    assert ray_problems(config, tmp_path, own_session=True) == []


def test_a_cluster_that_does_not_answer_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    config = runs.train_config("data", tmp_path)
    (problem,) = ray_problems(config, tmp_path, own_session=True)
    says(problem, "RAY_ADDRESS = 127.0.0.1:1", "no Ray cluster")
    named = runs.train_config("data", tmp_path, scaling={"address": "127.0.0.1:2"})
    (problem,) = ray_problems(named, tmp_path, own_session=True)
    says(problem, "scaling.address = 127.0.0.1:2", "no Ray cluster")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"])
def test_a_signal_asks_for_a_good_end(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Signals() as signals:
        signal.raise_signal(number)
        assert signals.wait(10)
    assert (signals.received, signals.status) == (name, 128 + number)
    assert signal.getsignal(number) is before


def test_signals_second_within_a_second_is_the_same_request_and_a_later_one_exits(log):
    now = [100.0]
    with Signals(clock=lambda: now[0]) as signals:
        signal.raise_signal(signal.SIGTERM)
        for number, seconds in ((signal.SIGTERM, 0.0), (signal.SIGHUP, 0.9)):
            now[0] = 100.0 + seconds
            signal.raise_signal(number)
            assert (signals.received, signals.status) == ("SIGTERM", 143)
        now[0] = 101.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    (line,) = log
    assert "SIGINT after SIGTERM" in line
    assert "without saving" in line
    assert "the same command continues" in line


def test_signals_after_another_reason_to_stop_exits():
    with Signals() as signals:
        signals.request_stop("the loss of the run's lock")
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    assert signals.status == 143


def test_under_nohup_a_hangup_is_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
