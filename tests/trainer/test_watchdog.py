"""Hanging and slow workers, found from heartbeats."""

import os
import signal
import socket
import time

import pytest
from messages import says

from declutr.trainer.driver.watchdog import Watchdog
from declutr.trainer.worker.backend import _signalled, listen
from declutr.trainer.worker.channel import ControlChannel
from declutr.trainer.worker.entry import Listener
from declutr.trainer.worker.heartbeat import Heartbeat
from declutr.trainer.worker.stopwatch import Stopwatch, describe_start


def heartbeat(rank, step=7, entered=30, phase="gather", group="g", **more):
    return {
        "rank": rank,
        "size": 3,
        "group": group,
        "node": "n",
        "host": f"host-{rank}",
        "pid": 100 + rank,
        "step": step,
        "steps": 7,
        "phase": phase,
        "phase_seconds": 0.0,
        "entered": entered,
        "own_seconds": 0.1,
    } | more


def watch(looks, watchdog_timeout_seconds=20.0, every=0.5):
    """Feeds `looks(seconds)` to a watchdog until it finds a hang; the hang and when."""
    dog, now = Watchdog(watchdog_timeout_seconds, straggler_factor=2.0), 0.0
    while now < 200:
        hang = dog.look(looks(now), now)
        if hang:
            return hang, now
        now += every
    return None, now


def alive(now, **changes):
    """What a living worker writes: the time in its phase goes on."""
    return {"phase_seconds": now, **changes}


def test_a_stopped_worker_is_found_by_its_silence_and_named():
    hang, at = watch(
        lambda now: [
            heartbeat(0, **alive(now)),
            heartbeat(1, phase="forward", entered=29, **alive(min(now, 3))),  # stops at 3 s
            heartbeat(2, **alive(now)),
        ]
    )
    assert at == pytest.approx(20, abs=1)
    assert (hang.heartbeat["rank"], round(hang.silent_seconds)) == (1, 17)
    says(str(hang), "worker 1", "host-1", "pid 101", "forward", "step 7", "gather")


def test_hang_names_the_living_worker_that_did_not_enter_the_exchange():
    hang, _ = watch(
        lambda now: [
            heartbeat(0, entered=31, **alive(now)),
            heartbeat(1, entered=31, **alive(now)),
            heartbeat(2, entered=30, phase="data", **alive(now)),
        ]
    )
    assert hang.heartbeat["rank"] == 2
    says(str(hang), "data", "step 7")
    says(str(hang), "gather")


def test_hang_of_workers_that_all_wait_names_none():
    hang, _ = watch(lambda now: [heartbeat(rank, **alive(now)) for rank in range(3)])
    says(str(hang), "3 workers", "same exchange", "none")


def test_a_group_that_moves_does_not_hang_and_one_that_starts_has_a_minute():
    assert watch(lambda now: [heartbeat(rank, entered=int(now) // 15) for rank in range(3)])[0] is None
    _, at = watch(
        lambda now: [heartbeat(rank, steps=0, phase="data", **alive(now)) for rank in range(3)],
        watchdog_timeout_seconds=5,
    )
    assert at == pytest.approx(60, abs=1)


def test_a_finished_group_and_the_heartbeats_of_a_group_that_is_gone_do_not_hang():
    assert watch(lambda now: [heartbeat(rank, phase="ended", **alive(now)) for rank in range(3)])[0] is None

    def shrunk(now):
        gone = heartbeat(2, group="old", entered=3)
        return [heartbeat(rank, group="new", entered=int(now * 2)) for rank in range(2)] + [gone]

    assert watch(shrunk)[0] is None


def test_worker_that_fetches_does_not_hang_while_it_lives():
    def looks(now, silent_from):
        fetches = heartbeat(0, phase="fetching", steps=0, **alive(min(now, silent_from)))
        return [fetches, heartbeat(1, steps=0, **alive(now))]

    assert watch(lambda now: looks(now, silent_from=1000))[0] is None
    hang, _ = watch(lambda now: looks(now, silent_from=3))
    assert hang.heartbeat["rank"] == 0


def test_a_slow_worker_is_named_once_and_a_moment_of_slowness_is_not():
    def looks(own):
        dog, found = Watchdog(600.0, straggler_factor=2.0), []
        for look in range(100):
            dog.look(
                [heartbeat(rank, steps=50, step=look, own_seconds=own(rank, look)) for rank in range(3)], look * 0.5
            )
            found += dog.slow()
        return found

    (sentence,) = looks(lambda rank, _: 0.25 if rank == 1 else 0.1)
    says(sentence, "worker 1", "host host-1", "pid 101", "slow", "0.25 s", "0.10 s")
    assert looks(lambda rank, look: 0.25 if rank == 1 and look % 10 < 9 else 0.1) == []
    assert looks(lambda rank, _: 0.19 if rank == 1 else 0.1) == []


@pytest.mark.parametrize(("steps", "looks", "named"), [(20, 20, True), (20, 19, False), (19, 100, False)])
def test_the_slower_of_two_workers_is_named_after_ten_seconds_and_twenty_steps(steps, looks, named):
    dog, found = Watchdog(600.0, straggler_factor=2.0), []
    for look in range(looks):
        dog.look([heartbeat(rank, steps=steps, own_seconds=(0.1, 0.25)[rank]) for rank in (0, 1)], look * 0.5)
        found += dog.slow()
    assert [sentence.split(" is slow")[0] for sentence in found] == ["worker 1 (host host-1, pid 101)"] * named


def test_a_heartbeat_separates_a_workers_own_time_from_waiting():
    heartbeat = Heartbeat(0, 2)
    heartbeat.finish_step(1, 100.0)  # a first step is not typical
    assert heartbeat.own_seconds is None
    begun = time.perf_counter()
    with heartbeat.exchange("gather"):
        assert heartbeat.snapshot()["phase"] == "gather"
        time.sleep(0.05)
    most = time.perf_counter() - begun
    heartbeat.finish_step(2, 1000.0)
    assert 1000.0 - most <= heartbeat.own_seconds <= 999.95
    assert (heartbeat.step, heartbeat.steps, heartbeat.entered, heartbeat.phase) == (2, 2, 1, "data")


def test_a_signal_is_told_with_the_workers_name():
    before = signal.getsignal(signal.SIGTERM)
    heartbeat = Heartbeat(3, 4)
    try:
        listen()
        with Listener(ControlChannel("of no session"), heartbeat) as listener:
            assert listener.notice() is None
            signal.raise_signal(signal.SIGTERM)
            name = f"SIGTERM to worker 3 (host {socket.gethostname()}, pid {os.getpid()})"
            assert listener.notice() == name
        assert heartbeat.snapshot()["notice"] == name
    finally:
        signal.signal(signal.SIGTERM, before)
        _signalled.clear()


def test_the_parts_of_a_start_add_up():
    watch = Stopwatch({"command": 100.0, "imports": 102.5, "ray": 105.0})
    assert watch.parts() == {"imports": 2.5, "ray": 2.5}
    says(describe_start(8, watch.parts()), "step 8", "5.0 s", "imports 2.5", "ray 2.5")
