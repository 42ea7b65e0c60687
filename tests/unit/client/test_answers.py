"""How the messages of a stream become an answer, and a catalogue models."""

import pytest
from forebay.engine.v1 import engine_service_pb2 as engine_pb
from forebay.inference.v1 import inference_service_pb2 as pb
from forebay.registry.v1 import registry_service_pb2 as registry_pb
from forebay_client.answers import Assembly, FinishReason, models_of
from forebay_client.errors import ServerFault


def test_an_answer_is_the_sum_of_its_deltas() -> None:
    assembly = Assembly("req-1")
    header = pb.AnswerHeader(model_version="m@1", system_fingerprint="simulated")
    assert assembly.add(pb.GenerateResponse(header=header)) is None
    first = assembly.add(pb.GenerateResponse(text_delta="Par", token_ids=[1]))
    assert first is not None
    assert first.text == "Par"
    assembly.add(
        pb.GenerateResponse(
            text_delta="is",
            token_ids=[2, 3],
            logprobs=[pb.TokenLogprobs(logprob=-0.5), pb.TokenLogprobs(logprob=-0.1)],
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=2),
        )
    )
    answer = assembly.finish((("forebay-replica", "r-1"), ("x-bin", b"\0")))
    assert answer.text == "Paris"
    assert answer.token_ids == (1, 2, 3)
    assert len(answer.logprobs) == 2
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.usage.cached_tokens == 2
    assert (answer.request_id, answer.replica) == ("req-1", "r-1")


def test_a_token_without_text_is_a_delta() -> None:
    delta = Assembly("r").add(pb.GenerateResponse(token_ids=[7]))
    assert delta is not None
    assert delta.token_ids == (7,)


def test_a_stream_that_ends_without_a_reason_is_a_fault() -> None:
    assembly = Assembly("r")
    assembly.add(pb.GenerateResponse(text_delta="half"))
    with pytest.raises(ServerFault):
        assembly.finish(())


def test_models_come_with_shares_and_aliases() -> None:
    spec = engine_pb.ModelSpec(backend=engine_pb.BACKEND_VLLM, context_tokens=2048)
    catalogue = registry_pb.Catalogue(
        models=[
            registry_pb.Model(
                name="m",
                versions=[
                    registry_pb.ModelVersion(version="1", spec=spec),
                    registry_pb.ModelVersion(version="2", spec=spec),
                    registry_pb.ModelVersion(version="3", spec=spec),
                ],
                split=[
                    registry_pb.SplitEntry(version="1", weight=95),
                    registry_pb.SplitEntry(version="2", weight=5),
                ],
            )
        ],
        aliases=[
            registry_pb.Alias(name="best", target="m@1"),
            registry_pb.Alias(name="other", target="n"),
        ],
    )
    (model,) = models_of(catalogue)
    assert [version.share for version in model.versions] == [0.95, 0.05, 0.0]
    assert model.aliases == ("best",)
    assert model.versions[0].backend == "vllm"
    assert model.versions[0].task == "generate"
