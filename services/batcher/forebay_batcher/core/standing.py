"""What the replica is for, and whose orders count.

Fences only grow: an order below the last one obeyed comes from somebody who has been replaced.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum

from forebay_common.errors import ForebayError, Reason


class Role(IntEnum):
    """What a replica is for. The numbers are the contract's."""

    ACTIVE = 1
    STANDBY = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Role, draining, and the fence of the last order obeyed."""

    role: Role
    draining: bool = False
    """Told to others: send nothing more."""
    closed: bool = False
    """What is sent nevertheless is refused. Follows `draining`, so that others can hear first."""
    fence: int = 0

    @property
    def is_serving(self) -> bool:
        """Requests are wanted."""
        return self.role is Role.ACTIVE and not self.draining

    def activate(self, fence: int, *, has_active_model: bool) -> Standing:
        """Obey the order to take traffic.

        Raises:
            ForebayError: INVALID_ARGUMENT, STALE_FENCE, DRAINING, or NO_REPLICA.
        """
        if fence < 1:
            raise ForebayError(Reason.INVALID_ARGUMENT, "fence must be at least 1.", param="fence")
        self._check(fence)
        if self.draining:
            raise ForebayError(Reason.DRAINING, "The replica is draining.")
        if not has_active_model:
            raise ForebayError(
                Reason.NO_REPLICA, "No model is loaded on this replica.", retry_after_s=1
            )
        return dataclasses.replace(self, role=Role.ACTIVE, fence=fence)

    def drain(self, fence: int) -> Standing:
        """Obey the order to drain; fence 0 is an operator's.

        Raises:
            ForebayError: STALE_FENCE.
        """
        if fence:
            self._check(fence)
        return dataclasses.replace(self, draining=True, fence=max(fence, self.fence))

    def close(self) -> Standing:
        """Refuse what still comes."""
        assert self.draining
        return dataclasses.replace(self, closed=True)

    def check_open(self) -> None:
        """Raise DRAINING or NO_REPLICA where requests are refused."""
        if self.closed:
            raise ForebayError(
                Reason.DRAINING, "This replica is draining; call another.", retry_after_s=1
            )
        if self.role is not Role.ACTIVE:
            raise ForebayError(
                Reason.NO_REPLICA, "This replica is a standby; call another.", retry_after_s=1
            )

    def _check(self, fence: int) -> None:
        if fence < self.fence:
            raise ForebayError(
                Reason.STALE_FENCE, f"The order has fence {fence}; {self.fence} was obeyed."
            )
