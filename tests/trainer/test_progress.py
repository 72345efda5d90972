from declutr.trainer.metrics.progress import ProgressBar


def test_a_continued_run_shows_the_steps_of_earlier_starts(capsys):
    with ProgressBar(lambda: None, 16, [], "docs", done=15):
        pass
    assert "(15 of 16)" in capsys.readouterr().err
