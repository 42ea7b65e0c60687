"""Which etcd is trusted with what."""

import pytest
from forebay_client.fleet.core.etcd_version import Verdict, judge, parse, show


def test_the_version_is_read_from_what_etcd_prints() -> None:
    printed = "etcd Version: 3.4.23\nGit SHA: abc\nGo Version: go1.19.8\nGo OS/Arch: linux/amd64\n"
    assert parse(printed) == (3, 4, 23)
    assert parse("etcd Version: 3.5.0-rc.1\n") == (3, 5, 0)
    assert parse("command not found") is None
    assert show((3, 5, 1)) == "3.5.1"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ((2, 3, 8), Verdict.TOO_OLD),
        ((3, 3, 27), Verdict.TOO_OLD),
        ((3, 4, 0), Verdict.FAULTY),
        ((3, 4, 21), Verdict.FAULTY),
        ((3, 4, 22), Verdict.SOUND),
        ((3, 4, 37), Verdict.SOUND),
        ((3, 5, 0), Verdict.FAULTY),
        ((3, 5, 2), Verdict.FAULTY),
        ((3, 5, 5), Verdict.FAULTY),
        ((3, 5, 6), Verdict.SOUND),
        ((3, 6, 0), Verdict.SOUND),
    ],
)
def test_each_version_is_judged(version: tuple[int, int, int], verdict: Verdict) -> None:
    assert judge(version) is verdict
