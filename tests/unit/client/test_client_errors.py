"""Which class a reason becomes."""

import pytest
from forebay_client import errors
from forebay_common.errors import ForebayError, Reason


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_class(reason: Reason) -> None:
    error = errors.typed(ForebayError(reason, "why", param="p", retry_after_s=2.0))
    assert type(error) is errors.CLASSES[reason]
    assert type(error) is not ForebayError
    assert (error.reason, error.message) == (reason, "why")
    assert (error.param, error.retry_after_s) == ("p", 2.0)


def test_a_missing_model_can_be_told_from_other_missing_things() -> None:
    assert issubclass(errors.ModelNotFound, errors.NotFound)
    assert errors.CLASSES[Reason.POOL_NOT_FOUND] is errors.NotFound
