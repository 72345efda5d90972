"""Whatever lies in the files, a check answers; it never fails."""

import shutil

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import says
from sentevaldata import write_rest

from declutr.evaluation.senteval.data.checking import inspect
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.tasks import TASKS, find

DAMAGE = st.one_of(
    st.binary(max_size=40),
    st.text("01\t\n\r .5aNtrvae-", max_size=40).map(str.encode),
    st.sampled_from(
        [b"\n", b"\xef\xbb\xbf", b"\r\n\r\n", b"\x85\n", b"\x93NUMPY\x01\x00v\x00{'descr': 'O'}", b"te\tA\tb\n"]
    ),
)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), damage=DAMAGE, keep=st.sampled_from(["nothing", "before", "after", "half"]))
def test_a_damaged_file_is_refused_or_read(every_task, tmp_path, data, damage, keep):
    task = data.draw(st.sampled_from(TASKS))
    name = data.draw(st.sampled_from(task_files(task)))
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    for known in task_files(task):
        (copy / known).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(every_task / known, copy / known)
    whole = (copy / name).read_bytes()
    kept = {"nothing": damage, "before": whole + damage, "after": damage + whole, "half": whole[: len(whole) // 2]}
    (copy / name).write_bytes(kept[keep])
    inspection = inspect(task, copy)
    assert inspection.standing == "refused"  # sets this small are never the published ones
    assert inspection.reason


def test_header_without_rows_is_refused(tmp_path):
    write_rest(tmp_path)
    path = tmp_path / "downstream/MRPC/msr_paraphrase_test.txt"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    says(inspect(find("MRPC"), tmp_path).reason, "MRPC test: 0 rows")
