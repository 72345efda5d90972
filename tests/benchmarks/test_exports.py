"""The benchmark of exports at a small size: each form with its figures."""

import json
import string

import pytest
from folders import TEXTS, encoder_folder

from benchmarks.exports import main

pytest.importorskip("onnxscript", reason="pip install -e '.[onnx]'")


@pytest.mark.slow
def test_every_form_has_its_figures(tmp_path):
    encoder_folder(tmp_path / "encoder", "bert", "mean")
    (tmp_path / "stsb").mkdir()
    rows = (f"a\tb\tc\td\t{number % 6}\ttext {number}\tword text {number % 5}\n" for number in range(12))
    (tmp_path / "stsb" / "sts-test.csv").write_text("".join(rows))
    words = (f"{first}{second} " for first in TEXTS[0].split() for second in string.ascii_lowercase)
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS, *words]))
    place = {"start": "encoder", "stsb": "stsb", "corpus": "texts.txt", "json": "out.json"}
    main([part for name, file in place.items() for part in (f"--{name}", str(tmp_path / file))])
    written = json.loads((tmp_path / "out.json").read_text())
    assert [one["name"] for one in written["exports"]] == ["onnx", "onnx-int8", "static"]
    graph, integers, table = written["exports"]
    assert graph["cosine"] > 0.99999 > integers["cosine"] > 0.9
    assert table["cosine"] is None
    for one in written["exports"]:
        assert one["speedup"] > 0 < one["bytes"]
        assert -100 <= one["stsb_before"] <= 100 >= one["stsb_after"] >= -100
        assert one["stsb_before"] == graph["stsb_before"]
    assert written["hardware"]["cpu"]
