"""Python client of Forebay, for the router or any other hop.

    from forebay_client import Client

    with Client("127.0.0.1:7070") as client:
        for delta in client.stream_chat("smollm2", "What is the capital of France?"):
            print(delta.text, end="", flush=True)

`AsyncClient` is the same for asyncio. Errors are in `forebay_client.errors`.
"""

from forebay_common.errors import ForebayError, Reason
from forebay_common.metadata import Usage

from forebay_client.aio import AsyncAnswerStream, AsyncClient
from forebay_client.answers import (
    Answer,
    CandidateLogprob,
    Delta,
    Embeddings,
    FinishReason,
    Model,
    ModelVersion,
    TokenLogprobs,
)
from forebay_client.errors import (
    Cancelled,
    Conflict,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    NotFound,
    Overloaded,
    RateLimited,
    ReplicaLost,
    ServerFault,
    Unreachable,
    Unsupported,
)
from forebay_client.requests import CallOptions, GenerateOptions, Message
from forebay_client.sync import AnswerStream, Client

__all__ = [
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "CallOptions",
    "Cancelled",
    "CandidateLogprob",
    "Client",
    "Conflict",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "Delta",
    "Embeddings",
    "FinishReason",
    "ForebayError",
    "GenerateOptions",
    "InvalidRequest",
    "Message",
    "Model",
    "ModelNotFound",
    "ModelVersion",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "RateLimited",
    "Reason",
    "ReplicaLost",
    "ServerFault",
    "TokenLogprobs",
    "Unreachable",
    "Unsupported",
    "Usage",
]
