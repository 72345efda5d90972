"""The recorded figures: `DECLUTR_GOLDEN` names another folder with the same file names and schema."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest


class Figures:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def json(self, name: str) -> Any:
        return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"{name}.npz") as file:
            return {key: file[key] for key in file.files}


@pytest.fixture(scope="session")
def figures() -> Figures:
    return Figures(Path(os.environ.get("DECLUTR_GOLDEN") or Path(__file__).parent / "data"))
