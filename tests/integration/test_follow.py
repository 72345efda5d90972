"""A run followed from outside: every checkpoint that can be had is scored once, the newest first."""

import threading
from dataclasses import replace

import pytest
import tinyruns as runs
from messages import all_of
from nanofiles import rows_of, write_test
from sentevalsets import write_sets
from waiting import until

from declutr.cli.main import main
from declutr.common.cluster import SessionConfig
from declutr.common.scores import SCORES, read_scores, read_scoring
from declutr.common.storage import read_json
from declutr.evaluation.retrieval.nanobeir import read_nanobeir
from declutr.evaluation.senteval.checks.checking import inspect
from declutr.evaluation.senteval.data.tasks import find
from declutr.evaluation.senteval.runner.plan import ScoringChoice
from declutr.evaluation.watch import Follower, FollowError
from declutr.trainer.driver.export import export

TASKS = ("STSBenchmark", "SICKRelatedness")


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"), rows=12)


def follower(run, sets, said, tasks=TASKS):
    inspections = [inspect(find(name), sets, allow_unchecked=True) for name in tasks]
    choice = ScoringChoice(tasks=tasks, protocols=("simcse",))
    return Follower(run, inspections, choice, "cpu", SessionConfig(num_cpus=1), said.append)


def test_a_finished_run_is_scored_once_and_exports_the_best(data, copied, sets, capsys, log):
    kept = sorted(int(path.name[5:]) for path in (copied / "checkpoints").glob("step-*"))
    given = ["evaluate", "--follow", str(copied), "--data", str(sets), "--allow-unchecked", "--once"]
    given += ["--tasks", ",".join(TASKS), "--protocol", "simcse"]
    config = runs.train_config(data, copied, **runs.FINISHED | {"validation": {"score": "followed"}}, export="best")
    assert read_json(export(runs.resolved(config)) / "declutr.json")["step"] == 8
    assert sum("the last checkpoint" in line for line in log) == 1
    assert main(given) == 0
    lines = read_scores(copied)
    assert [line.step for line in lines] == kept[::-1]
    assert len({line.score for line in lines}) == len(kept)
    for line in lines:
        assert line.score == pytest.approx(sum(line.tasks.values()) / 2)
        assert line.tasks.keys() == line.test.keys() == set(TASKS)
        assert line.tasks != line.test, "dev scores decide, and test scores are shown"
        assert any("published" in warning for warning in line.warnings)  # the data are our own
    assert main(given) == 0
    assert read_scores(copied) == lines
    assert (
        read_json(export(runs.resolved(config)) / "declutr.json")["step"]
        == max(lines, key=lambda line: line.score).step
    )
    assert sum("have no score" in line for line in log) == 1, "nothing is missing any more"
    assert main([*given, "--protocol", "senteval"]) == 0  # another choice: its own lines
    assert len(read_scores(copied)) == 2 * len(lines)
    assert "checkpoints scored" in capsys.readouterr().out


def test_checkpoints_are_scored_as_they_come_until_the_run_ends(copied, sets):
    aside = copied / "aside"
    aside.mkdir()
    checkpoints = sorted((copied / "checkpoints").glob("step-*"))
    for path in checkpoints:
        path.rename(aside / path.name)
    (copied / "summary.json").rename(aside / "summary.json")
    said, counted, named = [], [], set()
    one = follower(copied, sets, said)
    one = replace(one, say=lambda line: (said.append(line), named.add(read_scoring(copied))))
    thread = threading.Thread(target=lambda: counted.append(one.follow(wait_seconds=0.02)), daemon=True)
    thread.start()
    for number, path in enumerate(checkpoints, start=1):
        (aside / path.name).rename(path)
        until(lambda number=number: len(read_scores(copied)) >= number, f"score {number} after {said}")
    (aside / "summary.json").rename(copied / "summary.json")
    thread.join(30)
    assert counted == [len(checkpoints)]
    steps = [int(path.name[5:]) for path in checkpoints]
    assert [line.step for line in read_scores(copied)] == steps
    assert named - {None} == set(steps), "the trainer was not told what must not be deleted"
    assert read_scoring(copied) is None


def test_a_damaged_checkpoint_is_passed_over_and_named(copied, sets):
    newest = sorted((copied / "checkpoints").glob("step-*"))[-1]
    weights = newest / "encoder.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said = []
    assert follower(copied, sets, said).follow(once=True) == len(list((copied / "checkpoints").glob("step-*"))) - 1
    assert any("not scored" in line and newest.name in line for line in said)


def test_tasks_without_data_are_refused_before_anything_is_scored(copied, sets):
    with pytest.raises(FollowError, match="SUBJ: "):
        follower(copied, sets, [], ("MR", "SUBJ"))
    assert not (copied / SCORES).exists()


def test_tasks_with_test_data_alone_may_not_choose_a_checkpoint(copied, sets):
    with pytest.raises(FollowError, match=all_of("STS12", "test data", "--tasks", "(CR,", "SICK-R, STS-B")):
        follower(copied, sets, [], ("STSBenchmark", "STS12"))


def test_nanobeir_is_shown_next_to_the_scores_that_choose(copied, sets, tmp_path):
    write_test(tmp_path / "nanobeir", *rows_of(0))
    said = []
    one = replace(follower(copied, sets, said, TASKS[:1]), tests=read_nanobeir(tmp_path, ("NanoNQ",)))
    assert one.follow(once=True)
    for line in read_scores(copied):
        assert line.score == line.tasks["STSBenchmark"], "nothing else chooses"
        assert line.test.keys() == {"STSBenchmark", "NanoNQ"}
