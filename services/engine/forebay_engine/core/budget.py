"""Which model versions fit a host's declared memory."""

from collections.abc import Mapping

from forebay_engine.core.refusal import Refused

_MIB = 1 << 20


def check_fit(wanted_bytes: int, *, budget_bytes: int, taken_bytes: Mapping[str, int]) -> None:
    """Raise Refused INSUFFICIENT_MEMORY, with the figures, when a version does not fit.

    A budget of 0 is not declared: everything fits. So does a version that declares nothing.
    """
    taken = sum(taken_bytes.values())
    if not budget_bytes or not wanted_bytes or taken + wanted_bytes <= budget_bytes:
        return
    raise Refused(
        "INSUFFICIENT_MEMORY",
        f"The version needs {wanted_bytes // _MIB} MiB; of {budget_bytes // _MIB} MiB on this host "
        f"{taken // _MIB} MiB are taken by {len(taken_bytes)} loaded versions.",
    )
