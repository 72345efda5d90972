"""What a start loads: seconds of each start on few cores are imports."""

import subprocess
import sys

import pytest
import tinyruns as runs

CODE = "import sys\n{}\nprint(*sorted({{'torch', 'transformers', 'scipy.stats'}} & set(sys.modules)))"


@pytest.mark.parametrize(
    "imports",
    [
        "import trainer.train, trainer.driver.run",
        "import cli.inspect, inspection.describe",
        "import trainer.worker.launch, trainer.driver.group",
    ],
)
def test_no_torch_before_it_is_needed(imports):
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(imports)], cwd=runs.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
