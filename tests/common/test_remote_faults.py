"""A store that throttles, refuses, is full, or cuts its answers short."""

import os

import pytest
from faultystore import faulty_store
from messages import all_of

from declutr.common.stores.files import read_file, write_file
from declutr.common.stores.folders import is_whole, pull_folder, push_folder
from declutr.common.stores.retry import RemoteError, RetryPolicy

ONCE = RetryPolicy(total_seconds=0.0)
LARGE_BYTES = 11 * 2**20  # more than one part of an upload


@pytest.fixture(scope="module")
def store():
    with faulty_store() as (address, faults):
        yield address, faults


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "local"
    folder.mkdir()
    folder.joinpath("a.bin").write_bytes(os.urandom(LARGE_BYTES))
    folder.joinpath("b.txt").write_text("b" * 5000)
    return folder


@pytest.mark.slow
def test_throttling_and_short_answers_are_waited_out(store, folder, tmp_path):
    address, faults = store
    faults.refuse(503, "SlowDown", left=12)
    push_folder(folder, address("throttled"))
    assert faults.left == 0
    faults.truncate(left=3)
    pull_folder(address("throttled"), tmp_path / "back")
    assert faults.left == 0
    for name in ("a.bin", "b.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    faults.clear()


def test_expired_credentials_are_a_refusal_where_the_store_gives_no_reason(store):
    """An answer to HEAD has no body, so the store's own code is missing; waiting ten minutes would not help."""
    address, faults = store
    write_file(address("there"), b"x")
    faults.refuse(400, "ExpiredToken", methods=("HEAD",))
    with pytest.raises(RemoteError, match=all_of("refuses", "credentials", "expired", "renew")):
        read_file(address("there"))
    faults.clear()


def test_an_upload_that_breaks_off_is_no_folder_and_is_taken_up_again(store, folder):
    address, faults = store
    faults.refuse(400, "InvalidPart", methods=("POST",), left=1)
    with pytest.raises(RemoteError, match=r"a\.bin"):
        push_folder(folder, address("broken"), ONCE)
    faults.clear()
    assert not is_whole(address("broken"))
    push_folder(folder, address("broken"))
    assert is_whole(address("broken"))


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (400, "ExpiredToken", ("refuses", "credentials", "expired", "renew")),
        (403, "AccessDenied", ("refuses", "credentials", "permissions")),
        (507, "XMinioStorageFull", ("full", "free")),
        (403, "QuotaExceeded", "quota"),
    ],
)
def test_an_error_names_its_cause_and_the_remedy(store, status, code, remedy):
    address, faults = store
    write_file(address("kept"), b"before")
    faults.refuse(status, code)
    with pytest.raises(RemoteError, match=all_of(remedy)):
        write_file(address("kept"), b"after", ONCE)
    faults.clear()
    assert read_file(address("kept")) == b"before"
