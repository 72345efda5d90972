from declutr.trainer.metrics.progress import ProgressBar


def test_a_continued_run_shows_the_steps_of_earlier_starts(capsys):
    with ProgressBar(lambda: None, 16, [], "docs", done=15):
        pass
    assert "(15 of 16)" in capsys.readouterr().err


def test_a_loss_of_an_auxiliary_task_that_is_not_finite_does_not_end_the_bar(capsys):
    with ProgressBar(lambda: {"step": 16, "skipped": False, "loss": None}, 16, [], "docs", done=0):
        pass
    assert "loss not finite" in capsys.readouterr().err
