from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lumina_cache.telemetry import parse_linux as parse
from lumina_cache.telemetry.parse import MAX_BYTES, Unknown, complete_lines, unsigned

SAMPLES = Path(__file__).parent / "data" / "telemetry"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text("ascii")


def test_a_cut_off_last_line_is_not_read() -> None:
    assert complete_lines("a\nb\nc") == ["a", "b"]
    assert complete_lines("a\r\n") == ["a"]
    assert complete_lines("") == []


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1 ", "1_0", "٣", "1e3", "0x1", "1" * 21])
def test_only_plain_decimal_numbers_are_numbers(text: str) -> None:
    assert unsigned(text) is None


def test_meminfo_gives_bytes_by_name() -> None:
    table = parse.parse_kib_table(sample("meminfo.txt"))
    assert table["MemTotal"] == 16332144 * 1024
    assert table["MemAvailable"] == 8901234 * 1024
    assert table["Active(anon)"] == 3456789 * 1024
    assert "HugePages_Total" not in table  # a count, not kB


def test_status_gives_bytes_by_name() -> None:
    table = parse.parse_kib_table(sample("self_status.txt"))
    assert table["VmRSS"] == 123456 * 1024
    assert table["VmSwap"] == 2048 * 1024


def test_psi_gives_both_averages_or_says_why_not() -> None:
    assert parse.parse_psi(sample("psi.txt")) == parse.Stall(some_percent=12.34, full_percent=4.20)
    only_some = sample("psi.txt").splitlines(keepends=True)[0]
    assert isinstance(parse.parse_psi(only_some), Unknown)
    assert isinstance(parse.parse_psi(sample("psi.txt").replace("12.34", "912.34")), Unknown)


def test_vmstat_and_memory_stat_are_tables_of_numbers() -> None:
    assert parse.parse_table(sample("vmstat.txt"))["pswpout"] == 2100
    assert parse.parse_table(sample("memory_stat_v2.txt"))["inactive_file"] == 52428800


def test_a_limit_is_a_number_none_or_unknown() -> None:
    assert parse.parse_cgroup_limit("536870912\n") == 536870912
    assert parse.parse_cgroup_limit("max\n") is None
    assert parse.parse_cgroup_limit("9223372036854771712\n") is None
    for garbage in ("", "max", "5368\n70912\n", "-1\n", "maximal\n", f"{MAX_BYTES + 1}\n", f"{1 << 64}\n"):
        assert isinstance(parse.parse_cgroup_limit(garbage), Unknown), garbage


def test_a_counter_is_one_number_on_one_line() -> None:
    assert parse.parse_counter("4096\n") == 4096
    assert parse.parse_counter("0\n") == 0
    for garbage in ("", "4096", "4096 \n", "40\n96\n", "4k\n"):
        assert isinstance(parse.parse_counter(garbage), Unknown), garbage


def test_membership_tells_the_v2_path_from_the_v1_memory_path() -> None:
    assert parse.parse_cgroup_membership(sample("cgroup_v2.txt")) == parse.CgroupMembership(
        v2="/user.slice/app.scope", v1_memory=None
    )
    assert parse.parse_cgroup_membership(sample("cgroup_hybrid.txt")) == parse.CgroupMembership(
        v2="/", v1_memory="/jobs/one"
    )
    assert isinstance(parse.parse_cgroup_membership("nonsense\n"), Unknown)


def _psi_fields(text: str) -> dict[str, object]:
    found = parse.parse_psi(text)
    return {} if isinstance(found, Unknown) else {"some": found.some_percent, "full": found.full_percent}


FIELDS: dict[str, Callable[[str], dict[str, object]]] = {
    "meminfo.txt": lambda text: dict(parse.parse_kib_table(text)),
    "self_status.txt": lambda text: dict(parse.parse_kib_table(text)),
    "vmstat.txt": lambda text: dict(parse.parse_table(text)),
    "memory_stat_v2.txt": lambda text: dict(parse.parse_table(text)),
    "psi.txt": _psi_fields,
}
# A digit or a blank in place of a digit can leave a well-formed number: no parser could tell.
GARBAGE = st.text(
    st.characters(exclude_categories=["Nd", "Zs"], exclude_characters="\n\t0123456789 ").filter(
        lambda character: not character.isspace()
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", FIELDS)
def test_cut_anywhere_a_file_gives_true_values_or_none(name: str) -> None:
    whole, fields = sample(name), FIELDS[name]
    truth = fields(whole)
    assert truth
    for at in range(len(whole)):
        assert fields(whole[:at]).items() <= truth.items()


@pytest.mark.parametrize("name", FIELDS)
@given(where=st.integers(0, 400), garbage=GARBAGE)
def test_garbled_anywhere_a_file_gives_true_values_or_none(name: str, where: int, garbage: str) -> None:
    whole, fields = sample(name), FIELDS[name]
    at = where % len(whole)
    garbled = fields(whole[:at] + garbage + whole[at + len(garbage) :])
    truth = fields(whole)
    for field, value in garbled.items():
        assert field not in truth or truth[field] == value
    assert all(value in truth.values() for value in garbled.values())


@given(st.text() | st.binary().map(lambda raw: raw.decode("ascii", "replace")))
@example("some avg10=nan avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
@example("0::/\x00\n")
def test_no_text_makes_a_parser_raise(text: str) -> None:
    assert all(0 <= value <= MAX_BYTES for value in parse.parse_kib_table(text).values())
    parse.parse_table(text)
    for read in (
        parse.parse_psi,
        parse.parse_counter,
        parse.parse_cgroup_limit,
        parse.parse_cgroup_membership,
    ):
        found = read(text)
        assert not isinstance(found, Unknown) or found.reason
