"""When a service that died is started again."""

from forebay_client.fleet.core.restart import RestartPolicy, Restarts


def restarts() -> Restarts:
    return Restarts(RestartPolicy(first_s=0.5, most_s=4.0, stable_s=30.0, start_attempts=3))


def test_pauses_double_up_to_the_cap() -> None:
    deaths = restarts()
    pauses = [deaths.on_death(lived_s=1, was_ever_ready=True) for _ in range(6)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert deaths.count == 6


def test_a_long_life_is_forgiven() -> None:
    deaths = restarts()
    for _ in range(4):
        deaths.on_death(lived_s=1, was_ever_ready=True)
    assert deaths.on_death(lived_s=30, was_ever_ready=True) == 0.5


def test_what_never_got_ready_is_given_up() -> None:
    deaths = restarts()
    pauses = [deaths.on_death(lived_s=1, was_ever_ready=False) for _ in range(3)]
    assert pauses == [0.5, 1.0, None]


def test_what_was_ready_once_is_never_given_up() -> None:
    deaths = restarts()
    pauses = [deaths.on_death(lived_s=0, was_ever_ready=True) for _ in range(2000)]
    assert pauses[-1] == 4.0
