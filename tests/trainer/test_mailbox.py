"""Files by which the workers of a host share one of them that asks Ray's head."""

import os
import stat
import time

import pytest

from declutr.trainer.worker.channel import EVERY_SECONDS, ControlChannel, newest, period
from declutr.trainer.worker.entry import Listener, Mailbox
from declutr.trainer.worker.heartbeat import Heartbeat

SECONDS = 300.0


def boxes(folder, *ranks):
    return [Mailbox("start-node-group", rank, SECONDS, folder) for rank in ranks]


def silence(folder, rank):
    """Makes a worker's heartbeat as old as that of one that was killed or stands still."""
    at = time.time() - 4 * SECONDS
    os.utime(folder / "declutr-workers-start-node-group" / str(rank), (at, at))


def test_mailbox_lowest_rank_leads_and_passes_a_notice_on(tmp_path):
    three, five = boxes(tmp_path, 3, 5)
    five.write({"rank": 5})
    assert five.leads(), "no other has started"
    three.write({"rank": 3, "step": 1})
    three.write({"rank": 3, "step": 2})
    assert (three.leads(), five.leads()) == (True, False)
    assert sorted(five.heartbeats(), key=lambda one: one["rank"]) == [{"rank": 3, "step": 2}, {"rank": 5}]
    assert five.stop_reason() is None
    three.pass_on("SIGTERM")
    assert five.stop_reason() == "SIGTERM"
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_mailbox_silent_leader_is_replaced_until_it_writes_again(tmp_path):
    three, five = boxes(tmp_path, 3, 5)
    three.write({"rank": 3})
    five.write({"rank": 5})
    silence(tmp_path, 3)
    assert five.leads()
    assert {"rank": 3} in five.heartbeats(), "the watchdog sees that it stands still"
    three.write({"rank": 3})
    assert not five.leads()


def test_mailbox_last_worker_removes_the_folder(tmp_path):
    three, five, killed = boxes(tmp_path, 3, 5, 7)
    for box, rank in ((three, 3), (five, 5), (killed, 7)):
        box.write({"rank": rank})
    silence(tmp_path, 7)
    three.leave()
    assert five.leads()
    five.leave()
    assert list(tmp_path.iterdir()) == []


def test_mailbox_folders_of_killed_workers_are_removed_after_a_day(tmp_path):
    for name, age in (("old", 90_000), ("young", 80_000)):
        (tmp_path / f"declutr-workers-{name}").mkdir()
        at = time.time() - age
        os.utime(tmp_path / f"declutr-workers-{name}", (at, at))
    (box,) = boxes(tmp_path, 0)
    box.write({"rank": 0})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "declutr-workers-start-node-group",
        "declutr-workers-young",
    ]


def test_listener_without_shared_files_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    with Listener(ControlChannel("of no session"), Heartbeat(0, 1), folder=tmp_path / "file") as listener:
        listener.look()
        assert listener.notice() is None


def test_listener_shares_its_heartbeat_and_leaves_nothing(tmp_path):
    with Listener(ControlChannel("of no session"), Heartbeat(4, 8, group="g", node="n"), folder=tmp_path) as listener:
        listener.look()
        other = Mailbox("of no session-n-g", 5, SECONDS, tmp_path)
        assert [one["rank"] for one in other.heartbeats()] == [4]
        other.pass_on("a drained node")
        listener.look()
        assert listener.notice() == "a drained node"
    assert list(tmp_path.iterdir()) == []


def test_newest_heartbeat_counts_whoever_posted_it():
    before, after = ({"rank": 3, "group": group, "written": at} for group, at in (("a", 1.0), ("b", 2.0)))
    other = {"rank": 4, "group": "b", "written": 1.5}
    for posted in ([[before, other], [after]], [[after], [other, before]]):
        assert sorted(newest(posted), key=lambda one: one["rank"]) == [after, other]


@pytest.mark.parametrize(("size", "seconds"), [(1, EVERY_SECONDS), (256, EVERY_SECONDS), (512, 1.0), (10_000, 2.0)])
def test_period_grows_with_the_group_up_to_a_limit(size, seconds):
    assert period(size) == seconds
