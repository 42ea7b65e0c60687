"""What the catalogue takes and refuses."""

import pytest
from forebay.engine.v1 import engine_service_pb2 as engine
from forebay.registry.v1 import registry_service_pb2 as registry
from forebay_common.config import ConfigError
from forebay_registry import bootstrap
from forebay_registry.core import catalogue, names
from forebay_registry.core.refusal import RefusedError
from hypothesis import given
from hypothesis import strategies as st

NAME = st.from_regex(r"[a-z0-9_-][a-z0-9._-]{0,15}", fullmatch=True)


def a_version(name: str = "v1", *, sha256: str = "", **spec: object) -> registry.ModelVersion:
    fields = {"backend": engine.BACKEND_SIMULATED, "artifact_path": "/models/chat", **spec}
    return registry.ModelVersion(
        version=name,
        spec=engine.ModelSpec(**fields),  # type: ignore[arg-type]
        artifact_sha256=sha256,
    )


def put(
    model: registry.Model | None,
    version: registry.ModelVersion,
    *,
    now_unix_s: int = 100,
    max_versions: int = 4,
) -> registry.Model:
    return catalogue.put_version(
        model, "chat", version, now_unix_s=now_unix_s, max_versions=max_versions
    )


def a_model(*versions: str, **weights: int) -> registry.Model:
    model: registry.Model | None = None
    for version in versions or ("v1",):
        model = put(model, a_version(version))
    assert model is not None
    if weights:
        model = split(model, **weights)
    return model


def split(model: registry.Model, *, expected_revision: int = 0, **weights: int) -> registry.Model:
    entries = [registry.SplitEntry(version=v, weight=w) for v, w in weights.items()]
    return catalogue.set_split(model, entries, expected_revision=expected_revision)


def weights_of(model: registry.Model) -> dict[str, int]:
    return {entry.version: entry.weight for entry in model.split}


@pytest.mark.parametrize("text", ["a", "smollm2", "llama-3.1_8b", "x" * 64, ".hidden", "0"])
def test_these_are_names(text: str) -> None:
    assert names.is_name(text)


@pytest.mark.parametrize(
    "text",
    ["", "A", "a/b", "a b", "a\n", "\n", "x" * 65, ".", "..", "...", "é", "a@b", "a\0", "../etc"],
)
def test_these_are_no_names(text: str) -> None:
    assert not names.is_name(text)
    with pytest.raises(RefusedError, match="must be 1 to 64") as refused:
        names.check_name(text, param="model")
    assert refused.value.reason == "INVALID_ARGUMENT"
    assert refused.value.param == "model"


def test_a_target_is_a_name_or_a_version_of_it() -> None:
    assert names.split_target("chat", param="target") == ("chat", None)
    assert names.split_target("chat@v1", param="target") == ("chat", "v1")
    for bad in ("", "@", "chat@", "@v1", "chat@v1@v2", "chat@.."):
        with pytest.raises(RefusedError):
            names.split_target(bad, param="target")


def test_the_first_version_gets_all_traffic_and_later_ones_none() -> None:
    model = put(a_model("v1"), a_version("v2"), now_unix_s=200)
    assert weights_of(model) == {"v1": catalogue.MAX_WEIGHT}
    assert [v.version for v in model.versions] == ["v1", "v2"]
    assert [v.created_unix_s for v in model.versions] == [100, 200]
    assert [v.spec.model_version for v in model.versions] == ["chat@v1", "chat@v2"]


def test_putting_a_version_again_changes_nothing() -> None:
    model = a_model("v1", "v2")
    assert put(model, a_version("v2"), now_unix_s=999) == model


def test_what_is_put_is_never_changed_in_place() -> None:
    model, before = a_model("v1"), a_model("v1")
    put(model, a_version("v2"))
    put(model, a_version("v1", max_sequences=9))
    split(model, v1=1)
    catalogue.delete_version(put(model, a_version("v2")), "v2", ())
    assert model == before


def test_how_a_version_is_run_may_change_and_its_age_stays() -> None:
    model = put(a_model("v1"), a_version("v1", max_sequences=64, context_tokens=4096))
    assert model.versions[0].spec.max_sequences == 64
    assert model.versions[0].created_unix_s == 100


@pytest.mark.parametrize(
    "changed",
    [
        a_version(artifact_path="/models/other"),
        a_version(precision=engine.PRECISION_INT8),
        a_version(task=engine.TASK_EMBED),
        a_version(backend=engine.BACKEND_VLLM),
        a_version(profile="h100"),
    ],
)
def test_an_artifact_never_changes(changed: registry.ModelVersion) -> None:
    with pytest.raises(RefusedError) as refused:
        put(a_model("v1"), changed)
    assert refused.value.reason == "VERSION_IMMUTABLE"


def test_an_artifact_with_a_checksum_is_known_by_it() -> None:
    model = put(None, a_version(sha256="A" * 64))
    moved = put(model, a_version(sha256="a" * 64, artifact_path="/elsewhere"))
    assert moved.versions[0].spec.artifact_path == "/elsewhere"
    with pytest.raises(RefusedError) as refused:
        put(model, a_version(sha256="b" * 64))
    assert refused.value.reason == "VERSION_IMMUTABLE"


def test_a_checksum_can_be_added_and_is_kept() -> None:
    model = put(put(a_model("v1"), a_version(sha256="a" * 64)), a_version())
    assert model.versions[0].artifact_sha256 == "a" * 64


@pytest.mark.parametrize(
    ("version", "param"),
    [
        (a_version(""), "version.version"),
        (a_version("V1"), "version.version"),
        (a_version(backend=0), "version.spec.backend"),
        (a_version(backend=77), "version.spec.backend"),
        (a_version(precision=77), "version.spec.precision"),
        (a_version(task=77), "version.spec.task"),
        (a_version(backend=engine.BACKEND_VLLM, artifact_path=""), "version.spec.artifact_path"),
        (a_version(artifact_path="models/chat"), "version.spec.artifact_path"),
        (a_version(artifact_path="/models/../etc"), "version.spec.artifact_path"),
        (a_version(artifact_path="/models/\0"), "version.spec.artifact_path"),
        (a_version(artifact_path="/" + "x" * 5000), "version.spec.artifact_path"),
        (a_version(tensor_parallel=65), "version.spec.tensor_parallel"),
        (a_version(profile="../h100"), "version.spec.profile"),
        (a_version(model_version="other@v1"), "version.spec.model_version"),
        (a_version(sha256="beef"), "version.artifact_sha256"),
    ],
)
def test_a_wrong_version_is_refused_with_its_field(
    version: registry.ModelVersion, param: str
) -> None:
    with pytest.raises(RefusedError) as refused:
        put(None, version)
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", param)


def test_a_model_has_a_bounded_number_of_versions() -> None:
    model = a_model("v1", "v2", "v3", "v4")
    put(model, a_version("v4"))
    with pytest.raises(RefusedError, match="the most it may have"):
        put(model, a_version("v5"))


def test_a_version_with_traffic_is_not_deleted() -> None:
    model = a_model("v1", "v2", v1=95, v2=5)
    with pytest.raises(RefusedError) as refused:
        catalogue.delete_version(model, "v2", ())
    assert refused.value.reason == "VERSION_IN_USE"


def test_a_version_without_traffic_is_deleted() -> None:
    changed = catalogue.delete_version(a_model("v1", "v2", v1=1), "v2", ())
    assert changed is not None
    assert [v.version for v in changed.versions] == ["v1"]


def test_deleting_an_unknown_version_changes_nothing() -> None:
    model = a_model("v1")
    assert catalogue.delete_version(model, "v9", ()) == model


def test_the_last_version_takes_its_model_along() -> None:
    assert catalogue.delete_version(a_model("v1"), "v1", ()) is None


@pytest.mark.parametrize(
    ("target", "version", "is_held"),
    [
        ("chat@v2", "v2", True),
        ("chat@v1", "v2", False),
        ("chat", "v2", False),
        ("other@v2", "v2", False),
    ],
)
def test_an_alias_holds_what_it_stands_for(target: str, version: str, is_held: bool) -> None:
    aliases = [registry.Alias(name="stable", target=target)]
    model = a_model("v1", "v2", v1=1)
    if is_held:
        with pytest.raises(RefusedError, match="stable") as refused:
            catalogue.delete_version(model, version, aliases)
        assert refused.value.reason == "VERSION_IN_USE"
    else:
        assert catalogue.delete_version(model, version, aliases) != model


def test_an_alias_of_the_model_holds_its_last_version() -> None:
    with pytest.raises(RefusedError) as refused:
        catalogue.delete_version(a_model("v1"), "v1", [registry.Alias(name="a", target="chat")])
    assert refused.value.reason == "VERSION_IN_USE"


@pytest.mark.parametrize(
    "entries",
    [
        [],
        [("v1", 0)],
        [("v9", 1)],
        [("v1", 1), ("v1", 2)],
        [("v1", catalogue.MAX_WEIGHT + 1)],
        [("", 1)],
    ],
)
def test_a_wrong_split_is_refused(entries: list[tuple[str, int]]) -> None:
    wanted = [registry.SplitEntry(version=v, weight=w) for v, w in entries]
    with pytest.raises(RefusedError) as refused:
        catalogue.set_split(a_model("v1", "v2"), wanted, expected_revision=0)
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", "split")


@given(
    st.dictionaries(st.sampled_from(["v1", "v2", "v3", "v4"]), st.integers(0, 10_000), min_size=1)
)
def test_a_split_holds_what_was_asked_and_nothing_of_weight_0(weights: dict[str, int]) -> None:
    model = a_model("v1", "v2", "v3", "v4")
    if not any(weights.values()):
        with pytest.raises(RefusedError):
            split(model, **weights)
        return
    changed = split(model, **weights)
    assert weights_of(changed) == {v: w for v, w in weights.items() if w > 0}
    assert split(changed, **weights) == changed


def test_a_split_based_on_an_old_revision_conflicts() -> None:
    model = a_model("v1", "v2")
    model.revision = 7
    assert weights_of(split(model, expected_revision=7, v2=1)) == {"v2": 1}
    with pytest.raises(RefusedError) as refused:
        split(model, expected_revision=6, v2=1)
    assert refused.value.reason == "CONFLICT"


def shadow(
    model: registry.Model, version: str, percent: float, *, expected_revision: int = 0
) -> registry.Model:
    wanted = registry.Shadow(version=version, percent=percent)
    return catalogue.set_shadow(model, wanted, expected_revision=expected_revision)


def test_a_shadow_is_a_version_and_a_share_until_it_is_ended() -> None:
    model = a_model("v1", "v2")
    shadowed = shadow(model, "v2", 0.5)
    assert (shadowed.shadow.version, shadowed.shadow.percent) == ("v2", 0.5)
    assert not model.HasField("shadow")
    assert put(split(shadowed, v1=1), a_version("v3")).shadow == shadowed.shadow
    assert catalogue.set_shadow(shadowed, None, expected_revision=0) == model


@pytest.mark.parametrize(
    ("version", "percent", "param"),
    [
        ("v9", 1, "shadow.version"),
        ("", 1, "shadow.version"),
        ("v2", 0, "shadow.percent"),
        ("v2", -1, "shadow.percent"),
        ("v2", 100.1, "shadow.percent"),
        ("v2", float("nan"), "shadow.percent"),
    ],
)
def test_a_wrong_shadow_is_refused(version: str, percent: float, param: str) -> None:
    with pytest.raises(RefusedError) as refused:
        shadow(a_model("v1", "v2"), version, percent)
    assert (refused.value.reason, refused.value.param) == ("INVALID_ARGUMENT", param)


def test_a_shadow_based_on_an_old_revision_conflicts() -> None:
    model = a_model("v1", "v2")
    model.revision = 7
    with pytest.raises(RefusedError) as refused:
        shadow(model, "v2", 1, expected_revision=6)
    assert refused.value.reason == "CONFLICT"


def test_a_version_that_gets_copies_stays() -> None:
    shadowed = shadow(a_model("v1", "v2"), "v2", 5)
    with pytest.raises(RefusedError) as refused:
        catalogue.delete_version(shadowed, "v2", ())
    assert refused.value.reason == "VERSION_IN_USE"
    ended = catalogue.set_shadow(shadowed, None, expected_revision=0)
    assert catalogue.delete_version(ended, "v2", ()) == a_model("v1")


CHAT, LITTLE = a_model("v1"), registry.Model(name="little", versions=[a_version("v1")])


def check(alias: registry.Alias, *, aliases: tuple[str, ...] = ()) -> registry.Alias:
    models = {model.name: model for model in (CHAT, LITTLE)}
    return catalogue.check_alias(alias, models=models, aliases=aliases)


def test_an_alias_stands_for_a_model_or_a_version() -> None:
    for target in ("chat", "chat@v1"):
        assert check(registry.Alias(name="stable", target=target)).target == target


@pytest.mark.parametrize(
    ("reason", "name", "target", "aliases"),
    [
        ("INVALID_ARGUMENT", "Stable", "chat", ()),
        ("INVALID_ARGUMENT", "stable", "chat@@v1", ()),
        ("INVALID_ARGUMENT", "stable", "", ()),
        ("INVALID_ARGUMENT", "little", "chat", ()),
        ("INVALID_ARGUMENT", "a", "b", ("b",)),
        ("INVALID_ARGUMENT", "a", "a", ()),
        ("MODEL_NOT_FOUND", "a", "b", ()),
        ("MODEL_NOT_FOUND", "a", "chat@v9", ()),
    ],
)
def test_a_wrong_alias_is_refused(
    reason: str, name: str, target: str, aliases: tuple[str, ...]
) -> None:
    with pytest.raises(RefusedError) as refused:
        check(registry.Alias(name=name, target=target), aliases=aliases)
    assert refused.value.reason == reason


def tiered(name: str = "auto", target: str = "", **tiers: object) -> registry.Alias:
    fields = {"small": "little", "large": "chat@v1", "classifier": "light", **tiers}
    return registry.Alias(name=name, target=target, tiers=registry.Tiers(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("default", "tier", "target"),
    [
        (registry.TIER_UNSPECIFIED, registry.TIER_LARGE, "chat@v1"),
        (registry.TIER_LARGE, registry.TIER_LARGE, "chat@v1"),
        (registry.TIER_SMALL, registry.TIER_SMALL, "little"),
    ],
)
def test_who_knows_no_tiers_reads_the_default_ones_target(
    default: "registry.Tier.ValueType", tier: "registry.Tier.ValueType", target: str
) -> None:
    wanted = tiered(default_tier=default, threshold=0.0, small_prompt_tokens_max=2000)
    stored = check(wanted)
    assert (stored.tiers.default_tier, stored.target) == (tier, target)
    assert stored.tiers.HasField("threshold")
    assert check(stored) == stored
    assert not wanted.target


@pytest.mark.parametrize(
    ("reason", "param", "alias"),
    [
        ("INVALID_ARGUMENT", "alias.tiers.small", tiered(small="")),
        ("INVALID_ARGUMENT", "alias.tiers.large", tiered(large="little")),
        ("INVALID_ARGUMENT", "alias.tiers.large", tiered(large="auto")),
        ("INVALID_ARGUMENT", "alias.tiers.large", tiered(large="other")),
        ("INVALID_ARGUMENT", "alias.tiers.classifier", tiered(classifier="")),
        ("INVALID_ARGUMENT", "alias.tiers.classifier", tiered(classifier="Light 2")),
        ("INVALID_ARGUMENT", "alias.tiers.threshold", tiered(threshold=1.5)),
        ("INVALID_ARGUMENT", "alias.tiers.threshold", tiered(threshold=float("nan"))),
        ("INVALID_ARGUMENT", "alias.tiers.default_tier", tiered(default_tier=9)),
        ("INVALID_ARGUMENT", "alias.target", tiered(target="little")),
        ("MODEL_NOT_FOUND", "alias.tiers.small", tiered(small="nope")),
        ("MODEL_NOT_FOUND", "alias.tiers.small", tiered(small="chat@v2")),
    ],
)
def test_wrong_tiers_are_refused(reason: str, param: str, alias: registry.Alias) -> None:
    with pytest.raises(RefusedError) as refused:
        check(alias, aliases=("other",))
    assert (refused.value.reason, refused.value.param) == (reason, param)


def test_a_tiered_alias_holds_both_of_its_targets() -> None:
    aliases = [check(tiered(default_tier=registry.TIER_LARGE))]
    for model in (CHAT, LITTLE):
        with pytest.raises(RefusedError, match="auto") as refused:
            catalogue.delete_version(model, "v1", aliases)
        assert refused.value.reason == "VERSION_IN_USE"


def test_a_model_cannot_take_an_aliass_name() -> None:
    catalogue.check_new_model_name(names_alias=False)
    with pytest.raises(RefusedError):
        catalogue.check_new_model_name(names_alias=True)


@given(NAME, NAME)
def test_every_pair_of_names_makes_a_target(model: str, version: str) -> None:
    if names.is_name(model) and names.is_name(version):
        assert names.split_target(f"{model}@{version}", param="t") == (model, version)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"nope": 1}]', '[{"model": 3}]'])
def test_a_wrong_bootstrap_names_its_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="FOREBAY_REGISTRY_BOOTSTRAP"):
        bootstrap.parse(text)


def test_a_bootstrap_is_a_list_of_versions() -> None:
    text = '[{"model": "chat", "version": {"version": "v1", "spec": {"backend": 2}}}]'
    assert bootstrap.parse("") == ()
    assert [request.model for request in bootstrap.parse(text)] == ["chat"]
