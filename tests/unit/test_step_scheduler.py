"""Step-wise continuous batching: who joins and who steps, by example and by the thousand."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from triton_diffusion.scheduling import StepScheduler
from triton_diffusion.scheduling.step_scheduler import PATIENCE


def scheduler(max_num_seqs: int = 4, max_queue_size: int = 100) -> StepScheduler[str]:
    return StepScheduler(max_num_seqs, max_queue_size)


def add(requests: StepScheduler[str], *names: str) -> None:
    """Names like `A1`: the letter is the key."""
    for name in names:
        requests.add_request(name, key=name[0])


def step(requests: StepScheduler[str], *ending: str) -> tuple[str, ...]:
    wave = requests.schedule()
    requests.finish_requests(ending)
    return () if wave is None else wave.request_ids


def test_a_request_joins_the_running_ones_of_its_key_at_the_next_step() -> None:
    requests = scheduler()
    add(requests, "A1")
    assert step(requests) == ("A1",)
    add(requests, "A2", "A3")
    assert step(requests) == ("A1", "A2", "A3")


def test_room_that_one_leaves_is_taken_at_the_next_step() -> None:
    requests = scheduler(max_num_seqs=2)
    add(requests, "A1", "A2", "A3")
    assert step(requests, "A1") == ("A1", "A2")
    assert step(requests) == ("A2", "A3")


def test_running_keys_step_in_turn_each_with_all_of_its_requests() -> None:
    requests = scheduler()
    add(requests, "A1", "B1", "A2", "B2")
    assert [step(requests) for _ in range(4)] == [("A1", "A2"), ("B1", "B2")] * 2


def test_a_further_key_is_let_in_with_half_the_room_or_all_its_requests() -> None:
    requests = scheduler(max_num_seqs=4)
    add(requests, "A1", "A2", "A3", "B1", "B2")
    assert step(requests, "A1") == ("A1", "A2", "A3")  # room for one, and B has two
    assert step(requests) == ("B1", "B2")
    assert step(requests) == ("A2", "A3")


def test_while_a_key_waits_for_room_nobody_who_came_later_passes_it() -> None:
    requests = scheduler(max_num_seqs=4)
    add(requests, "A1", "A2", "A3", "B1", "B2")
    assert step(requests) == ("A1", "A2", "A3")
    add(requests, "A4")  # its key runs and there is room, but B came first
    assert step(requests, "A1", "A2") == ("A1", "A2", "A3")
    assert [step(requests), step(requests)] == [("B1", "B2"), ("A3", "A4")]


def test_a_short_request_does_not_wait_for_a_long_one_of_another_key() -> None:
    requests = scheduler(max_num_seqs=8)
    add(requests, "A1")
    step(requests)
    add(requests, *(f"B{number}" for number in range(9)))
    assert len(step(requests)) == 7
    assert step(requests) == ("A1",)


def test_a_key_that_never_fits_is_let_in_after_a_while() -> None:
    requests = scheduler(max_num_seqs=8)
    add(requests, "A1", "A2", "A3", "A4", "A5")  # all of them long
    step(requests)
    add(requests, "B1", "B2", "B3", "B4")  # half the room is four, and three is free
    steps = [step(requests) for _ in range(PATIENCE + 2)]
    assert steps[PATIENCE - 1] == ("A1", "A2", "A3", "A4", "A5")
    assert ("B1", "B2", "B3") in steps


def test_a_smaller_priority_goes_first() -> None:
    requests = scheduler(max_num_seqs=1)
    requests.add_request("late", "A", priority=0)
    requests.add_request("urgent", "B", priority=-1)
    requests.add_request("idle", "B", priority=9)
    assert [step(requests, name) for name in ("urgent", "late", "idle")] == [("urgent",), ("late",), ("idle",)]


arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), st.integers(1, 12), st.integers(-1, 1)), max_size=60
)


@settings(max_examples=1000)
@given(arrivals, st.integers(1, 6), st.booleans())
def test_everyone_gets_exactly_its_steps_and_nobody_starves(
    burst: list[tuple[int, int, int, int]], max_num_seqs: int, use_priorities: bool
) -> None:
    requests: StepScheduler[int] = StepScheduler(max_num_seqs, max_queue_size=1000)
    coming = sorted((at, number, key, steps, priority) for number, (at, key, steps, priority) in enumerate(burst))
    left: dict[str, int] = {}
    key_of: dict[str, int] = {}
    last_step: dict[int, int] = {}
    now = turn = 0
    while coming or left:
        while coming and coming[0][0] <= now:
            _, number, key, steps, priority = coming.pop(0)
            requests.add_request(str(number), key, priority if use_priorities else 0)
            left[str(number)], key_of[str(number)] = steps, key
        wave = requests.schedule()
        now += 1
        if wave is None:
            assert not left, "nobody runs, though somebody waits"
            continue
        turn += 1
        assert requests.num_running <= max_num_seqs
        running = requests.running_ids
        assert {key_of[name] for name in wave.request_ids} == {wave.key}
        assert list(wave.request_ids) == [name for name in running if key_of[name] == wave.key], "a key stays together"
        running_keys = {key_of[name] for name in running}
        assert all(turn - last_step.get(key, turn) <= max_num_seqs for key in running_keys), "every key gets its turn"
        last_step = {key: at for key, at in last_step.items() if key in running_keys} | {wave.key: turn}
        for name in wave.request_ids:
            left[name] -= 1
        ended = [name for name in wave.request_ids if left[name] == 0]
        requests.finish_requests(ended)
        for name in ended:
            del left[name]
    assert requests.num_running == requests.num_waiting == 0


@settings(max_examples=300)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 3))
def test_a_request_starts_though_another_key_never_stops_coming(max_num_seqs: int, steps: int, own_key: int) -> None:
    requests: StepScheduler[int] = StepScheduler(max_num_seqs, max_queue_size=10_000)
    left: dict[str, int] = {}

    def one_step(number: int) -> bool:
        for copy in range(max_num_seqs):
            requests.add_request(f"{number}-{copy}", key=0)
            left[f"{number}-{copy}"] = steps
        wave = requests.schedule()
        assert wave is not None
        for name in wave.request_ids:
            left[name] -= 1
        requests.finish_requests([name for name in wave.request_ids if left[name] == 0])
        return "mine" in wave.request_ids

    for number in range(5):
        one_step(number)
    ahead = requests.num_waiting
    requests.add_request("mine", key=own_key)
    left["mine"] = 1
    patience = steps * (math.ceil(ahead / max_num_seqs) + 2) + 8
    assert any(one_step(number) for number in range(5, 5 + patience))
