"""Which API keys a header can carry, what a header says, and whom it admits."""

from __future__ import annotations

import pytest

from pdcluster_connector.protocol.api_key import admits, headers, problem


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "is empty"),
        (" ", "white space"),
        ("hunter2\n", "begins or ends with white space"),
        ("\thunter2", "begins or ends with white space"),
        ("two words", "no HTTP header carries"),
        ("two\nlines", "no HTTP header carries"),
        ("schlüssel", "no HTTP header carries"),
        ("bell\a", "no HTTP header carries"),
    ],
)
def test_a_key_that_no_header_carries_has_a_problem_that_does_not_show_it(
    key: str, why: str
) -> None:
    found = problem(key)
    assert found is not None
    assert why in found
    assert found.startswith("VLLM_API_KEY ")
    assert not key.strip() or key.strip() not in found


@pytest.mark.parametrize("key", ["s", "sk-AZ09_~+/=.", "x" * 4096])
def test_a_key_of_letters_and_digits_has_none_and_is_admitted(key: str) -> None:
    assert problem(key) is None
    assert admits(key, headers(key)["Authorization"])


def test_without_a_key_no_header_is_sent() -> None:
    assert headers(None) == {}


@pytest.mark.parametrize(
    "given",
    ["", "Bearer", "Bearer ", "secret", "Basic secret", "Bearer secre", "Bearer secrets",
     "Bearer secret\udcff", "Bearer \udcff\ud800"],
)  # fmt: skip
def test_another_header_is_not_admitted(given: str) -> None:
    """aiohttp gives surrogates for the bytes of a header that are not UTF-8."""
    assert not admits("secret", given)


def test_the_scheme_is_read_as_http_reads_it() -> None:
    assert admits("secret", "bearer secret")
    assert admits("secret", "BEARER  secret ")
