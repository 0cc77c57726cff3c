"""Which requests run next. The rules are tested by the thousand on random arrivals, ends and cancellations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_diffusion.errors import QueueFullError
from triton_diffusion.scheduling import RequestScheduler


def scheduler(max_num_seqs: int = 4, max_queue_size: int = 100) -> RequestScheduler[str]:
    return RequestScheduler(max_num_seqs, max_queue_size)


def test_alternating_keys_run_in_full_waves() -> None:
    # Triton's queue is first in, first out: there, these would run in eight batches of one.
    requests = scheduler()
    for number in range(8):
        requests.add_request(str(number), key="AB"[number % 2])
    waves = []
    while wave := requests.schedule():
        waves.append((wave.key, wave.request_ids))
        requests.finish_requests(wave.request_ids)
    assert waves == [("A", ("0", "2", "4", "6")), ("B", ("1", "3", "5", "7"))]


def test_the_key_whose_oldest_request_waits_longest_goes_first() -> None:
    requests = scheduler(max_num_seqs=2)
    for request_id, key in [("b1", "B"), ("a1", "A"), ("a2", "A"), ("a3", "A"), ("b2", "B"), ("b3", "B")]:
        requests.add_request(request_id, key)
    order = []
    while wave := requests.schedule():
        order.append(wave.request_ids)
        requests.finish_requests(wave.request_ids)
    assert order == [("b1", "b2"), ("a1", "a2"), ("a3",), ("b3",)]


def test_a_wave_runs_to_its_end_and_nobody_joins() -> None:
    requests = scheduler()
    requests.add_request("1", "A")
    requests.add_request("2", "A")
    first = requests.schedule()
    assert first is not None
    requests.add_request("3", "A")
    requests.finish_requests(["1"])
    again = requests.schedule()
    assert again is not None
    assert (again.wave_id, again.request_ids) == (first.wave_id, ("2",))
    assert (requests.num_running, requests.num_waiting) == (1, 1)


def test_a_full_backlog_refuses_and_running_requests_do_not_count() -> None:
    requests = scheduler(max_num_seqs=1, max_queue_size=2)
    requests.add_request("running", "A")
    requests.schedule()
    requests.add_request("1", "A")
    requests.add_request("2", "A")
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        requests.add_request("3", "A")
    assert requests.waiting_ids == ["1", "2"]


def test_an_id_cannot_be_added_twice() -> None:
    requests = scheduler()
    requests.add_request("1", "A")
    with pytest.raises(ValueError, match="added twice"):
        requests.add_request("1", "B")


@pytest.mark.parametrize(("seqs", "queue"), [(0, 1), (1, 0)])
def test_capacities_are_at_least_one(seqs: int, queue: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RequestScheduler(seqs, queue)


# An event: an arrival of a key, a step that ends some of the running requests, or the end of a waiting request.
events = st.lists(
    st.tuples(st.just("arrive"), st.integers(0, 3))
    | st.tuples(st.just("step"), st.integers(0, 8))
    | st.tuples(st.just("cancel"), st.integers(0, 30)),
    max_size=120,
)


@settings(max_examples=1000)
@given(events, st.integers(1, 5), st.integers(1, 12))
def test_no_request_is_lost_none_runs_twice_and_none_starves(
    happenings: list[tuple[str, int]], max_num_seqs: int, max_queue_size: int
) -> None:
    requests: RequestScheduler[int] = RequestScheduler(max_num_seqs, max_queue_size)
    waiting: list[str] = []  # what must wait, in order of arrival: the model to compare with
    key_of: dict[str, int] = {}
    running: set[str] = set()
    ended: list[str] = []
    waves_since_arrival: dict[str, int] = {}
    ahead_at_arrival: dict[str, int] = {}

    def step(number_to_end: int) -> None:
        new_wave = not running
        wave = requests.schedule()
        if wave is None:
            assert not waiting
            assert not running
            return
        if new_wave:
            assert waiting[0] in wave.request_ids, "the oldest request runs next"
            same_key = [request_id for request_id in waiting if key_of[request_id] == wave.key]
            assert list(wave.request_ids) == same_key[:max_num_seqs], "as many of its key as fit, in order"
            for request_id in waiting:
                waves_since_arrival[request_id] += 1
                assert waves_since_arrival[request_id] <= ahead_at_arrival[request_id] + 1
            running.update(wave.request_ids)
            waiting[:] = [request_id for request_id in waiting if request_id not in running]
        assert set(wave.request_ids) == running
        ending = sorted(running)[:number_to_end]
        requests.finish_requests(ending)
        running.difference_update(ending)
        ended.extend(ending)

    for number, (kind, value) in enumerate(happenings):
        request_id = str(number)
        if kind == "arrive":
            if len(waiting) >= max_queue_size:
                with pytest.raises(QueueFullError):
                    requests.add_request(request_id, value)
                continue
            requests.add_request(request_id, value)
            key_of[request_id] = value
            waves_since_arrival[request_id] = 0
            ahead_at_arrival[request_id] = len(waiting)
            waiting.append(request_id)
        elif kind == "step":
            step(value)
        elif str(value) in [*waiting, *running]:
            requests.finish_requests([str(value)])
            running.discard(str(value))
            waiting[:] = [request_id for request_id in waiting if request_id != str(value)]
            ended.append(str(value))
        assert requests.num_waiting == len(waiting)
        assert requests.num_running == len(running)
        assert requests.waiting_ids == waiting

    while waiting or running:
        step(max_num_seqs)
    assert sorted(ended) == sorted(key_of), "every request that was let in ended exactly once"


@given(events)
def test_the_order_is_the_same_every_time(happenings: list[tuple[str, int]]) -> None:
    def order() -> list[tuple[str, ...]]:
        requests: RequestScheduler[int] = RequestScheduler(3, 1000)
        waves = []
        for number, (kind, value) in enumerate(happenings):
            if kind == "arrive":
                requests.add_request(str(number), value)
            elif wave := requests.schedule():
                waves.append(wave.request_ids)
                requests.finish_requests(wave.request_ids[:value])
        return waves

    assert order() == order()
