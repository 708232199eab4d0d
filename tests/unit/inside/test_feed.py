"""The index iterator: order, epochs, and what returns to the front."""

from __future__ import annotations

import itertools
import random

from feedtune.inside.feed import Feed, RecordedSampler


class Passes:
    """Yields ``(pass, position)``: another pass is told apart."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.passes = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        self.passes += 1
        return iter([(self.passes - 1, i) for i in range(self.length)])


def take(feed: Feed, count: int) -> list:
    return list(itertools.islice(feed, count))


def endless(length: int):
    return ((number, i) for number in itertools.count() for i in range(length))


def test_what_was_not_delivered_comes_first_again_and_in_order() -> None:
    feed = Feed(Passes(10), endless=True)
    assert take(feed, 7) == [(0, i) for i in range(7)]
    for _ in range(3):
        feed.deliver()
    feed.give_back()
    assert (feed.handed, feed.delivered) == (3, 3)
    assert take(feed, 9) == [(0, i) for i in range(3, 10)] + [(1, 0), (1, 1)]


def test_giving_back_twice_is_giving_back_once() -> None:
    feed = Feed(Passes(5), endless=True)
    take(feed, 3)
    feed.give_back()
    feed.give_back()
    assert take(feed, 3) == [(0, 0), (0, 1), (0, 2)]


def test_any_run_of_blocks_delivers_the_sampler_order() -> None:
    for seed in range(200):
        source = random.Random(seed)
        length = source.randint(1, 9)
        feed = Feed(Passes(length), endless=True)
        got, queue = [], []
        ends = 0
        for _ in range(60):
            action = source.random()
            if action < 0.6:
                queue += take(feed, source.randint(0, 4))
            elif action < 0.9 and queue:
                got.append(queue.pop(0))
                feed.deliver()
                ends += feed.at_epoch_end()
            elif action >= 0.9:
                feed.give_back()
                queue.clear()
        assert got == list(itertools.islice(endless(length), len(got)))
        assert feed.delivered == len(got)
        # An end is known once the first batch after it has been drawn.
        assert ends in (len(got) // length, (len(got) - 1) // length)


def test_an_epoch_ends_with_the_delivery_of_its_last_batch_once() -> None:
    feed = Feed(Passes(3), endless=True)
    take(feed, 5)
    told = []
    for _ in range(5):
        feed.deliver()
        told.append(feed.at_epoch_end())
    assert told == [False, False, True, False, False]
    assert not feed.at_epoch_end()


def test_an_epoch_end_that_was_in_flight_survives_giving_back() -> None:
    feed = Feed(Passes(3), endless=True)
    take(feed, 5)
    feed.deliver()
    feed.give_back()
    take(feed, 4)
    told = []
    for _ in range(4):
        feed.deliver()
        told.append(feed.at_epoch_end())
    assert told == [False, True, False, False]


def test_a_sampler_that_can_be_read_once_ends_the_feed() -> None:
    feed = Feed(iter(range(4)), endless=True)
    assert take(feed, 10) == [0, 1, 2, 3]
    assert feed.epoch_length is None


def test_a_feed_that_is_not_endless_ends_with_its_pass() -> None:
    sampler = Passes(4)
    feed = Feed(sampler, endless=False)
    assert len(take(feed, 10)) == 4
    assert sampler.passes == 1
    assert feed.epoch_length == 4


def test_a_sampler_without_a_usable_length() -> None:
    class Shy(Passes):
        def __len__(self) -> int:
            raise NotImplementedError

    assert Feed(Shy(3), endless=True).epoch_length is None


def test_a_recorded_sampler_shows_its_latest_pass() -> None:
    recorded = RecordedSampler(Passes(2))
    assert len(recorded) == 2
    assert list(recorded) == [(0, 0), (0, 1)]
    first = recorded.feed
    assert list(recorded) == [(1, 0), (1, 1)]
    assert recorded.feed is not first
