"""One command a run in a store, as far as a store without conditional writes allows."""

import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from damagedjson import DAMAGED
from messages import all_of, says
from s3server import s3_server
from waiting import until

from declutr.common.lock import LOCK, RunLockedError
from declutr.common.stores import lease
from declutr.common.stores.address import child
from declutr.common.stores.files import names, read_file, write_file
from declutr.common.stores.lease import Lease

HOLD = "import sys; from declutr.common.stores.lease import Lease\n"
HOLD += "with Lease(sys.argv[1], print): print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def address(tmp_path):
    return f"file://{tmp_path}/there"


def held(address):
    """The record of the holder, or None."""
    url, seconds = child(address, LOCK), time.monotonic() + 60
    while (raw := read_file(url)) == b"":  # a local file, unlike a store's, is empty while it is written
        assert time.monotonic() < seconds
    return None if raw is None else json.loads(raw)


def take(address):
    with Lease(address, lambda: None):
        assert held(address)["pid"] == os.getpid()


def test_a_living_command_is_waited_for_and_a_dead_one_is_not(address):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, address], **pipes)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=all_of("another command", f"pid {holder.pid}")):
            take(address)
    finally:
        holder.kill()
        holder.wait()
    assert held(address)["pid"] == holder.pid
    take(address)
    assert held(address) is None


@pytest.mark.parametrize("behind_seconds", [-3600, 0, 61])  # the holder's clock
@pytest.mark.parametrize(("age_seconds", "refused"), [(5, True), (70, False), (-3600, False)])
def test_on_another_host_the_stores_clock_decides(address, tmp_path, age_seconds, refused, behind_seconds):
    with Lease(address, lambda: None):
        holder = held(address)
    renewed = time.time() - age_seconds
    there = holder | {"host": "elsewhere", "beat": renewed - behind_seconds}
    write_file(child(address, LOCK), json.dumps(there).encode())
    os.utime(tmp_path / "there" / LOCK, (renewed, renewed))
    if refused:
        with pytest.raises(RunLockedError, match="elsewhere"):
            take(address)
        assert held(address) == there
    else:
        take(address)


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_lease_is_nobodys(address, log, content):
    write_file(child(address, LOCK), content)
    take(address)
    says(log, "lock.json", "damaged")
    assert held(address) is None


def test_the_clock_of_a_store():
    with s3_server() as place:
        address = place("run")
        with Lease(address, lambda: None):
            holder = held(address)
        there = holder | {"host": "elsewhere", "beat": time.time() - 3600}
        write_file(child(address, LOCK), json.dumps(there).encode())
        with pytest.raises(RunLockedError, match="elsewhere"):
            take(address)
        assert names(address) == [LOCK]


def test_lease_is_renewed_and_its_loss_reported(address):
    lost = threading.Event()
    with Lease(address, lost.set, beat_seconds=0.05):
        first = held(address)
        until(lambda: held(address)["beat"] != first["beat"])
        deadline = time.monotonic() + 20
        other = first | {"token": "another's"}
        while not lost.is_set():  # a renewal on its way may take its place once
            assert time.monotonic() < deadline
            write_file(child(address, LOCK), json.dumps(other).encode())
            time.sleep(0.2)
    assert held(address)["token"] == "another's"


def test_lease_of_two_commands_goes_to_the_last_writer(address, monkeypatch):
    """Both have seen a free address before either of them wrote; the other writes while this one lets it settle."""
    pauses = []

    def settle(seconds):
        pauses.append(seconds)
        write_file(child(address, LOCK), json.dumps(held(address) | {"token": "another's", "pid": 7}).encode())

    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=settle, time=time.time))
    with pytest.raises(RunLockedError, match="pid 7"), Lease(address, lambda: None, settle_seconds=1.0):
        pass
    assert pauses == [1.0]
    assert held(address)["token"] == "another's"
