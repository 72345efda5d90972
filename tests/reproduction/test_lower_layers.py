"""`declutr.reproduction.lower_layers`."""

import pytest
from folders import encoder_folder
from messages import all_of
from transformers import AutoModel

from declutr.reproduction import lower_layers


def test_lower_layers_are_those_of_the_source(tmp_path):
    (tmp_path / "source").mkdir()
    source = encoder_folder(tmp_path / "source", "bert")
    lower_layers.main([str(source), "1", str(tmp_path / "one")])
    whole, cut = AutoModel.from_pretrained(source), AutoModel.from_pretrained(tmp_path / "one")
    assert cut.config.num_hidden_layers == len(cut.encoder.layer) == 1
    theirs = whole.state_dict()
    assert all(value.equal(theirs[name]) for name, value in cut.state_dict().items())
    with pytest.raises(SystemExit, match=all_of("9 layers", "has 2")):
        lower_layers.main([str(source), "9", str(tmp_path / "nine")])
    assert not (tmp_path / "nine").exists()


@pytest.mark.parametrize(("source", "target", "part"), [("none", "new", "no config.json"), ("one", "one", "exists")])
def test_wrong_folders_are_refused(tmp_path, capsys, source, target, part):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        lower_layers.main([str(tmp_path / source), "1", str(tmp_path / target)])
    assert part in capsys.readouterr().err
