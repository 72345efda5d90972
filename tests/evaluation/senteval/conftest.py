import pytest
from sentevaldata import write_binary, write_rest, write_retrieval, write_sts

from declutr.evaluation.senteval.tasks import TASKS


@pytest.fixture(scope="module")
def every_task(tmp_path_factory):
    path = tmp_path_factory.mktemp("senteval")
    write_binary(path)
    write_rest(path)
    write_retrieval(path)
    write_sts(path, {int(task.name[3:]): tuple(task.files) for task in TASKS if task.procedure == "similarity"})
    return path
