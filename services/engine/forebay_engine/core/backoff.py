"""How long to wait before a dead runner is started again."""


def restart_delay_s(failures: int, *, first_s: float, most_s: float) -> float:
    """Return the pause after the given number of failures in a row: doubled each time, capped."""
    assert failures >= 1
    # The exponent is bounded so that a long-broken model cannot overflow the power.
    return min(first_s * 2.0 ** min(failures - 1, 32), most_s)
