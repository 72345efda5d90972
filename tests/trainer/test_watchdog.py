"""Hanging workers, what a start waits for, and signals."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import Future

import pytest
import tinyruns as runs
from messages import says

from declutr.trainer.driver import supervisor
from declutr.trainer.driver.supervisor import Signals
from declutr.trainer.run import RunPlan
from declutr.trainer.worker.backend import _signalled, listen
from declutr.trainer.worker.channel import EVERY_SECONDS, ControlChannel, period
from declutr.trainer.worker.entry import Listener
from declutr.trainer.worker.heartbeat import Heartbeat, Watchdog


def heartbeat(rank, step=7, phase="forward", group="g", **more):
    worker = {"rank": rank, "size": 3, "group": group, "node": "n", "host": f"host-{rank}", "pid": 100 + rank}
    state = {"step": step, "steps": 7, "phase": phase, "written": 0.0, "line": None, "logged": [], "num_logged": 0}
    return worker | state | more


def group(now, *changes):
    """Heartbeats of living workers with these changes."""
    return [heartbeat(rank, **{"written": now} | change) for rank, change in enumerate(changes)]


def watch(looks, watchdog_timeout_seconds=20.0, every=0.5):
    """Feeds `looks(seconds)` to a watchdog until it finds a hang; the hang and when."""
    dog, now = Watchdog(watchdog_timeout_seconds), 0.0
    while now < 200:
        hang = dog.look(looks(now), now)
        if hang:
            return hang, now
        now += every
    return None, now


def test_a_stopped_worker_is_found_by_its_silence_and_named():
    """It stops at 3 s, ahead of the others. If all wait, the worker is named with a doubt."""
    hang, at = watch(lambda now: group(now, {}, {"step": 8, "phase": "data", "written": min(now, 3)}, {}))
    assert at == pytest.approx(20, abs=1)
    assert (hang.heartbeat["rank"], round(hang.silent_seconds)) == (1, 17)
    says(str(hang), "worker 1", "host-1", "pid 101", "data", "step 8")
    assert "another" not in str(hang)
    says(str(watch(lambda now: group(now, {}, {}, {}))[0]), "all workers", "another")


def test_hang_names_the_living_worker_that_is_behind():
    for behind, others in (
        ({"phase": "data"}, {}),
        ({"step": 6}, {}),
        ({"phase": "saving"}, {"phase": "data"}),
        ({"phase": "saving"}, {"phase": "reporting"}),  # a worker that writes nothing reports at once
        ({"phase": "choosing kernels"}, {"phase": "data"}),
        ({"step": 6}, {"step": 9}),
    ):
        hang, _ = watch(lambda now, own=behind, other=others: group(now, other, other, own))
        assert hang.heartbeat["rank"] == 2
        says(str(hang), hang.heartbeat["phase"], f"step {hang.heartbeat['step']}")
        assert "another" not in str(hang)


def test_groups_that_move_or_have_finished_do_not_hang_and_one_that_starts_has_a_minute():
    """Heartbeats of a group that is gone do not count."""
    assert watch(lambda now: [heartbeat(rank, step=int(now) // 15) for rank in range(3)])[0] is None
    assert watch(lambda now: group(now, *[{"phase": "ended"}] * 3))[0] is None
    gone = heartbeat(2, group="old", step=3)
    shrunk = watch(lambda now: [gone, *(heartbeat(rank, group="new", step=int(now * 2)) for rank in range(2))])
    assert shrunk[0] is None
    _, at = watch(lambda now: group(now, *[{"steps": 0, "phase": "data"}] * 3), 5)
    assert at == pytest.approx(60, abs=1)


@pytest.mark.parametrize(("phase", "waiting"), [("fetching", "forward"), ("writing", "reporting")])
def test_worker_that_waits_for_a_storage_does_not_hang_while_it_lives(phase, waiting):
    storing, other = {"phase": phase, "steps": 0}, {"phase": waiting, "steps": 0}
    for silent_from, rank in ((1000, None), (3, 0)):
        hang, _ = watch(lambda now, end=silent_from: group(now, storing | {"written": min(now, end)}, other))
        assert (hang and hang.heartbeat["rank"]) == rank


def test_a_heartbeat_has_step_phase_and_a_signal_with_the_workers_name_also_without_a_session():
    before, heartbeat = signal.getsignal(signal.SIGTERM), Heartbeat(3, 4)
    heartbeat.finish_step(1)
    with heartbeat.doing("saving"):
        assert heartbeat.snapshot()["phase"] == "saving"
    heartbeat.finish_step(2)
    assert (heartbeat.step, heartbeat.steps, heartbeat.phase) == (2, 2, "data")
    try:
        listen()
        with Listener(ControlChannel("of no session"), heartbeat) as listener:
            listener.look()
            assert listener.notice() is None
            signal.raise_signal(signal.SIGTERM)
            name = f"SIGTERM to worker 3 (host {socket.gethostname()}, pid {os.getpid()})"
            assert listener.notice() == name
        assert heartbeat.snapshot()["notice"] == name
    finally:
        signal.signal(signal.SIGTERM, before)
        _signalled.clear()


def test_a_start_without_a_step_is_logged_until_its_first_step(tmp_path, monkeypatch, log):
    starting = [heartbeat(0, steps=0, phase="starting"), heartbeat(1, steps=0, phase="data")]
    looks = [[], starting, [heartbeat(0, steps=1)]]
    monkeypatch.setattr(supervisor, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_SLOW_SECONDS", 0.0)
    plan = RunPlan(runs.least_config(), tmp_path, {}, {}, None, {})
    monkeypatch.setattr(RunPlan, "total_steps", 6)
    monkeypatch.setattr(RunPlan, "for_workers", lambda _: {"config": {"run": "r"}})
    fit = Future()

    class Reader:
        draining, stop_reason, answered = None, None, time.monotonic()
        heartbeats = property(lambda _: looks[len(log)])

    supervised = supervisor.Supervisor(plan, Signals(), 0.0, None)
    threading.Timer(0.5, fit.set_result, [None]).start()
    assert supervised._watch(fit, Reader()) is None
    first, second = log
    says(first, "no step yet after 0 s", "none")
    says(second, "1 data, 1 starting")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"])
def test_a_signal_asks_for_a_good_end(name):
    number = getattr(signal, name)
    if (before := signal.getsignal(number)) is signal.SIG_IGN:
        pytest.skip(f"{name} is ignored here (nohup)")
    with Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.wait(10)
    assert (signals.received, signals.status) == (name, 128 + number)
    assert signal.getsignal(number) is before


def test_signals_second_within_a_second_is_the_same_request_and_a_later_one_exits(log):
    """The first signal after another reason to stop exits too."""
    now = [100.0]
    with Signals(clock=lambda: now[0]) as signals:
        for number, now[0] in ((signal.SIGTERM, 100.0), (signal.SIGTERM, 100.0), (signal.SIGHUP, 100.9)):
            signal.raise_signal(number)
            assert (signals.received, signals.status) == ("SIGTERM", 143)
        now[0] = 101.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    (line,) = log
    says(line, "SIGINT after SIGTERM", "without saving", "the same command continues")
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


def test_period_grows_with_the_group_up_to_a_limit():
    assert [period(size) for size in (1, 256, 512, 10_000)] == [EVERY_SECONDS, EVERY_SECONDS, 1.0, 2.0]
