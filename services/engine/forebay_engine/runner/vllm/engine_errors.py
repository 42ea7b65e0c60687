"""Exceptions of vLLM's engine as ours."""

from forebay_common.errors import ForebayError, Reason
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from forebay_engine.runner.vllm import errors


def translate(error: BaseException, request: bytes = b"") -> ForebayError:
    """Return the error that a caller gets for an exception."""
    if isinstance(error, ForebayError):
        return error
    if isinstance(error, EngineDeadError):
        return ForebayError(Reason.REPLICA_LOST, "The engine died.", retry_after_s=1)
    if isinstance(error, GracefulHTTPError):
        return ForebayError(Reason.QUEUE_FULL, "The engine's queue is full.", retry_after_s=1)
    if isinstance(error, NotImplementedError):
        return ForebayError(Reason.UNSUPPORTED, "This model does not offer that.")
    if isinstance(error, VLLMClientError | ValueError | TypeError | OverflowError):
        param = error.parameter if isinstance(error, VLLMValidationError) else None
        return errors.refuse(str(error), param=param, request=request)
    return ForebayError(Reason.INTERNAL, "The engine failed on this request.")
