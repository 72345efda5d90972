"""The thread that repeats a call."""

import threading
import time

from declutr.common.watcher import Watcher


class Counter(Watcher):
    """Counts its calls; the third one ends the thread."""

    def __init__(self, seconds, at_once):
        super().__init__(seconds, "test", at_once)
        self.calls, self.third = 0, threading.Event()

    def look(self):
        self.calls += 1
        if self.calls == 3:
            self.third.set()
            return False
        return None


def test_calls_repeat_until_false_or_the_end_of_the_block():
    with Counter(0.01, at_once=False) as counter:
        assert counter.third.wait(60)
        for thread in [thread for thread in threading.enumerate() if thread.name == "test"]:
            thread.join(60)
            assert not thread.is_alive()
    assert counter.calls == 3
    with Counter(3600, at_once=False) as counter:
        pass
    assert counter.calls == 0, "the pause comes first, and the end of the block cuts it short"


def test_the_first_call_may_come_without_a_pause():
    with Counter(3600, at_once=True) as counter:
        while not counter.calls:
            pass
    assert counter.calls == 1


def test_a_call_that_has_begun_is_over_when_the_block_ends():
    begun, ended = threading.Event(), []

    class Slow(Watcher):
        def look(self):
            begun.set()
            time.sleep(0.2)
            ended.append(1)

    with Slow(3600, "test", at_once=True):
        assert begun.wait(60)
    assert ended == [1]
