"""Preparation into an S3 server by three hosts that share no folder; one of them and some processes are killed."""

import pytest

from benchmarks.prepare import hosts
from benchmarks.prepare.lab import missing

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]


def test_prepare_on_three_hosts_survives_the_loss_of_one(tmp_path):
    """`measure` compares every output with that of one machine, byte for byte."""
    if reason := missing():
        pytest.skip(reason)
    given = hosts.options().parse_args(["--hosts", "--documents", "600", "--unit-mib", "0.2", "--kills", "3", "--near"])
    killed = hosts.measure(given, tmp_path)["kills"]
    assert killed["host"] == 1
    assert killed["task"] + killed["command"] == 3
    assert killed["bytes_equal"]
