"""Keys, records and proto JSON."""

import pytest
from forebay.batcher.v1 import batcher_service_pb2 as batcher
from forebay_common.discovery import Instance, Keys, from_json, to_json
from forebay_common.errors import ForebayError, Reason

KEYS = Keys("/ns")


def test_each_key_lies_under_its_prefix() -> None:
    layout = {
        KEYS.replica("r"): (KEYS.replicas, "/ns/replicas/r"),
        KEYS.instance("router", "i"): (KEYS.instances_of("router"), "/ns/instances/router/i"),
        KEYS.warm("chat", "r"): (KEYS.warm_in("chat"), "/ns/warm/chat/r"),
        KEYS.claim("chat", "r"): (KEYS.claims_in("chat"), "/ns/claims/chat/r"),
        KEYS.model("org/name"): (KEYS.models, "/ns/models/org/name"),
        KEYS.alias("a"): (KEYS.aliases, "/ns/aliases/a"),
        KEYS.pool("chat"): (KEYS.pools, "/ns/pools/chat"),
    }
    for key, (prefix, expected) in layout.items():
        assert key == expected
        assert prefix.endswith("/")
        assert key.startswith(prefix)
    assert KEYS.instances_of("router").startswith(KEYS.instances)
    assert KEYS.decisions("chat").endswith("/")


def test_no_two_kinds_share_a_key() -> None:
    keys = [
        KEYS.replica("x"),
        KEYS.instance("x", "x"),
        KEYS.warm("x", "x"),
        KEYS.claim("x", "x"),
        KEYS.model("x"),
        KEYS.alias("x"),
        KEYS.pool("x"),
        KEYS.leader("x"),
        KEYS.decisions("x"),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["", "a/b"])
def test_a_name_that_would_leave_its_place_is_refused(name: str) -> None:
    for make in (KEYS.replica, KEYS.pool, KEYS.leader, KEYS.warm_in, KEYS.claims_in):
        with pytest.raises(ForebayError) as caught:
            make(name)
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert caught.value.param is not None
    with pytest.raises(ForebayError):
        KEYS.model("")


def test_a_message_survives_proto_json_on_one_line() -> None:
    replica = batcher.Replica(replica_id="r1", pool="chät", fence=2**60, draining=True)
    value = to_json(replica)
    assert b"\n" not in value
    assert '"chät"' in value.decode()
    assert from_json(batcher.Replica, value) == replica


def test_fields_of_a_newer_writer_are_ignored() -> None:
    value = b'{"replicaId": "r1", "fromTheFuture": {"a": [1]}, "role": "ROLE_FROM_THE_FUTURE"}'
    assert from_json(batcher.Replica, value) == batcher.Replica(replica_id="r1")


@pytest.mark.parametrize(
    "value", [b"", b"[]", b"{", b"\xff", b'{"draining": "maybe"}', b'{"replicaId": 1}', b"null"]
)
def test_what_is_no_message_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError):
        from_json(batcher.Replica, value)


def test_an_instance_survives_its_record() -> None:
    instance = Instance("router", "r1", "0.1.0", {"grpc": "127.0.0.1:1"})
    assert Instance.decode("/k", instance.encode()) == instance
    newer = instance.encode()[:-1] + b', "zone": "a"}'
    assert Instance.decode("/k", newer) == instance


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"service": "s", "addresses": []}',
        b'{"service": 1, "instance_id": "i", "version": "v", "addresses": {}}',
        b'{"service": "s", "instance_id": "i", "version": "v", "addresses": {"grpc": 1}}',
    ],
)
def test_what_is_no_instance_is_a_value_error(value: bytes) -> None:
    with pytest.raises(ValueError):
        Instance.decode("/k", value)
