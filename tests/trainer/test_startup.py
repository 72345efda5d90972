"""What a start loads: seconds of each start on few cores are imports."""

import json
import socket
import subprocess
import sys

import pytest
import tinyruns as runs
from prepared import Row, write_prepared

from declutr.common.lock import RunLock

CODE = "import sys\n{}\nprint(*sorted({{'torch', 'transformers', 'scipy.stats'}} & set(sys.modules)))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import declutr.trainer.train, declutr.trainer.driver.run",
        "import declutr.cli.inspect, declutr.inspection.describe, declutr.inspection.order",
        "import declutr.trainer.driver.group",
    ],
)
def test_no_torch_before_it_is_needed(imports):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(imports)], cwd=runs.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


REFUSALS = """import json, sys
from declutr.cli.main import main
for arguments in json.load(sys.stdin):
    status = main(arguments)
    late = sorted({"torch", "transformers", "ray"} & set(sys.modules))
    print(f"status {status}, loaded {late}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with shards and a configuration."""
    folder = tmp_path_factory.mktemp("startup")
    texts = [" ".join(f"word{(3 * row + place) % 50}" for place in range(90)) for row in range(20)]
    write_prepared(folder / "out", [[Row(text) for text in texts]], geometry=runs.GEOMETRY)
    runs.write_config(folder / "train.yaml", train=runs.train_values(folder / "out", folder / "run"))
    return folder


def test_wrong_use_is_refused_before_torch_and_ray_are_loaded(prepared, tmp_path):
    (tmp_path / "held").mkdir()
    train = ["train", f"{prepared}/train.yaml"]
    with RunLock(tmp_path / "held", print):
        cases = [
            ([*train, "objective={kind: simcse}"], "objective.kind = simcse reads sentences"),
            ([*train, "batch_documents=1000"], "batch_documents = 1000: the shards hold only 20 training documents"),
            ([*train, "spans.max_tokens=17"], "spans.max_tokens = 17: the shards were prepared for at most 16"),
            ([*train, f"run={tmp_path}/held"], f"another command works here (host {socket.gethostname()}, pid"),
            (["embed", "hashed-words:8", f"{tmp_path}/no.txt", "--output", f"{tmp_path}/o.npy"], "matches no file"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", REFUSALS],
            cwd=runs.ROOT,
            input=json.dumps([arguments for arguments, _ in cases]),
            capture_output=True,
            text=True,
            check=True,
        )
    parts = done.stderr.split("status 1, loaded []\n")
    assert len(parts) == len(cases) + 1, done.stderr
    for (_, message), part in zip(cases, parts, strict=False):
        assert message in part
    assert not list(tmp_path.glob("[!h]*"))
