"""The queries cut from test documents."""

import numpy as np
import pytest

from benchmarks.adapt import _hits, _paragraphs, main


def test_paragraphs_of_a_document_are_cut_after_their_first_sentence():
    rest = " ".join(f"word{n}" for n in range(30))
    whole = "This is a first sentence of some words. " + rest
    text = "\n".join(["A heading", whole, "Too short a paragraph to search. It has no rest."] + [whole] * 20)
    found = _paragraphs(text)
    assert len(found) == 8
    assert set(found) == {("This is a first sentence of some words.", rest)}
    assert _paragraphs("A heading") == []


class Plane:
    """Encodes a text as the direction that its number names."""

    def encode(self, texts):
        return np.array([[np.cos(float(text)), np.sin(float(text))] for text in texts])


def test_found_counts_sentences_of_each_document_that_find_their_paragraph():
    hits = _hits(Plane(), [0, 0, 2], ["0.0", "1.0", "2.0"], ["0.1", "2.1", "1.4"])
    assert hits.tolist() == [[1, 2], [0, 1]]


def test_runs_need_a_corpus(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--start", str(tmp_path)])
    assert "--corpus" in capsys.readouterr().err
    main(["--start", str(tmp_path), "--work", str(tmp_path), "--calibrate", "1"])  # of finished runs, and there is none
    assert '"calibration": []' in capsys.readouterr().out
