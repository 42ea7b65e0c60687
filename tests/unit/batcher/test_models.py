"""Which model version is meant, and whether it is served here."""

from __future__ import annotations

import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay_batcher.core.models import Engine, Model, ModelState
from forebay_batcher.core.queue import PriorityClass
from forebay_batcher.core.standing import Role
from forebay_common.errors import ForebayError, Reason
from forebay_common.metadata import CLASSES


def a_model(
    model_version: str = "chat@1",
    state: ModelState = ModelState.ACTIVE,
    *,
    generation: int = 1,
) -> Model:
    return Model(model_version, state, generation=generation, socket_path="/run/s", slots=4)


def an_engine(*models: Model) -> Engine:
    return Engine().described({model.model_version: model for model in models})


def refusal(engine_: Engine, wanted: str, *, pinned: bool = False) -> Reason:
    with pytest.raises(ForebayError) as caught:
        engine_.resolve(wanted, pinned=pinned)
    return caught.value.reason


def test_a_version_is_found_by_its_full_name() -> None:
    found = an_engine(a_model("chat@1"), a_model("chat@2")).resolve("chat@2", pinned=False)
    assert found.model_version == "chat@2"


def test_a_bare_name_means_its_only_active_version() -> None:
    host = an_engine(a_model("chat@1", ModelState.DRAINING), a_model("chat@2"), a_model("embed@1"))
    assert host.resolve("chat", pinned=False).model_version == "chat@2"


def test_a_bare_name_with_several_versions_is_refused() -> None:
    host = an_engine(a_model("chat@1"), a_model("chat@2"))
    assert refusal(host, "chat") is Reason.INVALID_ARGUMENT


def test_an_empty_name_is_refused() -> None:
    assert refusal(an_engine(a_model()), "") is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("state", [s for s in ModelState if s is not ModelState.ACTIVE])
def test_a_model_that_is_not_active_is_not_loaded(state: ModelState) -> None:
    host = an_engine(a_model(state=state))
    assert refusal(host, "chat@1") is Reason.MODEL_NOT_LOADED
    assert refusal(host, "chat") is Reason.MODEL_NOT_LOADED


def test_an_unknown_model_is_not_found_unless_another_hop_chose_it() -> None:
    host = an_engine(a_model())
    assert refusal(host, "other@1") is Reason.MODEL_NOT_FOUND
    assert refusal(host, "chat@2") is Reason.MODEL_NOT_FOUND
    assert refusal(host, "other@1", pinned=True) is Reason.MODEL_NOT_LOADED


def test_before_the_host_was_heard_no_model_is_called_unknown() -> None:
    assert refusal(Engine(), "chat@1") is Reason.MODEL_NOT_LOADED


def test_without_its_host_no_model_is_offered() -> None:
    silent = an_engine(a_model()).silent()
    assert (silent.active, silent.capacities(), silent.is_warm) == ([], {}, False)
    assert refusal(silent, "chat@1") is Reason.MODEL_NOT_LOADED
    assert silent.described({"chat@1": a_model()}).active == [a_model()]


def test_a_dead_runner_is_not_offered_although_its_host_still_does() -> None:
    host = an_engine(a_model(generation=3)).without_runner("chat@1", 3)
    assert host.models["chat@1"].state is ModelState.FAILED
    again = host.described({"chat@1": a_model(generation=3)})
    assert again.active == []
    assert again.described({"chat@1": a_model(generation=4)}).capacities()["chat@1"].generation == 4


def test_why_a_model_failed_is_told_while_it_is_known() -> None:
    failed = Model("chat@1", ModelState.FAILED, reason="The artifact holds a pickle.")
    host = an_engine(failed)
    assert host.models["chat@1"].reason == "The artifact holds a pickle."
    assert host.silent().models["chat@1"].reason == ""
    lost = an_engine(a_model()).without_runner("chat@1", 1)
    assert lost.models["chat@1"].reason == "The runner does not answer."


def test_news_of_an_older_runners_death_changes_nothing() -> None:
    host = an_engine(a_model(generation=4))
    assert host.without_runner("chat@1", 3) is host


def test_a_replica_is_warm_when_every_model_is_active() -> None:
    assert an_engine(a_model("a@1"), a_model("b@1")).is_warm
    assert not an_engine(a_model("a@1"), a_model("b@1", ModelState.LOADING)).is_warm
    assert not an_engine().is_warm


def test_the_numbers_are_the_contracts() -> None:
    states = {f"MODEL_STATE_{state.name}": state.value for state in ModelState}
    states["MODEL_STATE_UNSPECIFIED"] = states.pop("MODEL_STATE_UNKNOWN")
    assert states == dict(engine.ModelState.items())
    classes = {f"PRIORITY_CLASS_{each.name}": each.value for each in PriorityClass}
    assert {"PRIORITY_CLASS_UNSPECIFIED": 0} | classes == dict(batcher.PriorityClass.items())
    roles = {f"ROLE_{role.name}": role.value for role in Role}
    assert {"ROLE_UNSPECIFIED": 0} | roles == dict(batcher.Role.items())
    assert tuple(PriorityClass.__members__) == CLASSES
