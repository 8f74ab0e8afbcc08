"""kv_connector_extra_config: everything wrong at once, nothing ignored."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import fields

from pdcluster_connector.certificate_files import TlsFiles
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.vllm.config import ConfigError, ConnectorOptions, parse_options

KEY = {"ticket_key_file": "/run/key"}


def test_defaults_are_safe_ones() -> None:
    assert parse_options(KEY) == ConnectorOptions(
        side_channel_host="127.0.0.1",
        side_channel_port=5600,
        lease_seconds=60.0,
        drain_deadline_seconds=30.0,
        transfer_stall_seconds=300.0,
        allow_insecure=False,
        backends=("UCX",),
        num_threads=4,
        backend_options=(),
        ticket_key_file="/run/key",
        local_tokens_per_step=512,
    )


def test_every_option_is_taken() -> None:
    options = parse_options(
        {
            "side_channel_host": "10.0.0.7",
            "side_channel_port": 7000,
            "lease_seconds": 5,
            "drain_deadline_seconds": 2.5,
            "transfer_stall_seconds": 600,
            "allow_insecure": True,
            "backends": ["UCX"],
            "num_threads": 0,
            "local_tokens_per_step": 64,
            "show_internal_names": True,
            "kv_layout": "BHLNC",
            "ticket_key_file": "/run/key",
            "ticket_audience": "ns/c/k",
            "backend_options": {"UCX": {"device_list": "mlx5_0:1", "split_batch_size": 2048}},
        }
    )
    nixl = (("UCX", "device_list", "mlx5_0:1"), ("UCX", "split_batch_size", "2048"))
    assert options == ConnectorOptions(
        "10.0.0.7", 7000, 5.0, 2.5, 600.0, True, ("UCX",), 0, nixl, True, "/run/key", "ns/c/k",
        kv_layout="BHLNC", local_tokens_per_step=64,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["LBNHC", "bhlnc", "", "Auto", ["BHLNC"], None])
def test_a_layout_that_cannot_be_asked_for(layout: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_layout: .* is none of LBHNC, BLHNC, BHLNC"):
        parse_options({"kv_layout": layout, **KEY})


def test_the_data_parallel_rank_moves_the_port() -> None:
    options = parse_options({"side_channel_port": 5600, **KEY}, data_parallel_rank=3)
    assert options.side_channel_port == 5603
    with pytest.raises(ConfigError, match="over 65535"):
        parse_options({"side_channel_port": 65535}, data_parallel_rank=1)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(
            {
                "side_chanel_port": 5600,
                "side_channel_port": "5600",
                "lease_seconds": 0,
                "allow_insecure": "yes",
                "side_channel_host": "",
                "ticket_key_file": "relative/key",
                "ticket_audience": 7,
            }
        )
    message = str(caught.value)
    assert "side_chanel_port: unknown key; did you mean side_channel_port?" in message
    assert "side_channel_port: '5600' is not a port" in message
    assert "lease_seconds: 0 is not between" in message
    assert "allow_insecure: 'yes'" in message
    assert "ticket_key_file: 'relative/key' is not the absolute path" in message
    assert "ticket_audience: 7 is not a text" in message
    assert "side_channel_host: ''" in message


@pytest.mark.parametrize(
    ("backends", "why"),
    [
        (
            ["UCX", "GDS"],
            "names GDS, which moves data between memory and storage.*use UCX or LIBFABRIC",
        ),
        (["GPUNETIO"], "names GPUNETIO, which is not known to carry KV"),
        (["UCX", "LIBFABRIC"], "names two backends: NIXL would choose for each transfer; use one"),
        ([], "is not a list of NIXL backends"),
        ("UCX", "is not a list of NIXL backends"),
        ([1], "is not a list of NIXL backends"),
    ],
)
def test_a_backend_that_carries_no_kv_is_refused_with_the_reason(backends, why) -> None:
    with pytest.raises(ConfigError, match=rf"backends: .*{why}"):
        parse_options({"backends": backends})


@pytest.mark.parametrize("backends", [["UCX"], ["LIBFABRIC"], ["UCX", "UCX"]])
def test_one_backend_is_taken_as_it_is_named(backends: list[str]) -> None:
    options = parse_options({"backends": backends, "allow_insecure": True})
    assert options.backends == tuple(backends)


@pytest.mark.parametrize("threads", [-1, 65, True, "4", 4.0, None])
def test_threads_are_a_small_number(threads: object) -> None:
    with pytest.raises(ConfigError, match=r"num_threads: .* is not a whole number from 0 to 64"):
        parse_options({"num_threads": threads})


@pytest.mark.parametrize("tokens", [-1, 2**20 + 1, True, "512", 1.5, None])
def test_tokens_of_a_step_are_a_whole_number(tokens: object) -> None:
    with pytest.raises(
        ConfigError, match=r"local_tokens_per_step: .* is not a whole number from 0 to 1048576"
    ):
        parse_options({"local_tokens_per_step": tokens})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"UCX": {"ucx_device": "mlx5_0"}},
            "UCX.ucx_device, which is not an option of UCX; the options are",
        ),
        ({"UCX": {"num_threads": 4}}, "which is not an option of UCX"),
        ({"UCX": {"ucx_error_handling_mode": "none"}}, "which is not an option of UCX"),
        (
            {"GDS": {"num_workers": 1}},
            "GDS.num_workers, which is not an option of GDS; the options are none",
        ),
        ({"UCX": {"num_workers": 0}}, "UCX.num_workers, which is not a whole number from 1 to 64"),
        ({"UCX": {"num_workers": 65}}, "which is not a whole number"),
        ({"UCX": {"split_batch_size": 0}}, "which is not a whole number"),
        ({"UCX": {"split_batch_size": 2**20 + 1}}, "which is not a whole number"),
        ({"UCX": {"num_workers": "2"}}, "which is not a whole number"),
        ({"UCX": {"num_workers": True}}, "which is not a whole number"),
        ({"UCX": {"device_list": ""}}, "which is not a text of 1 to 1024 characters"),
        ({"UCX": {"device_list": "x" * 1025}}, "which is not a text"),
        ({"UCX": []}, "does not map backends to options"),
        (["UCX"], "does not map backends to options"),
    ],
    ids=str,
)
def test_backend_options_are_known_and_bounded(options: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"backend_options: .*{why}"):
        parse_options({"backend_options": options})


def test_backend_options_may_have_their_smallest_and_their_largest_value() -> None:
    for given in (
        {"num_workers": 1, "split_batch_size": 1, "device_list": "x"},
        {"num_workers": 64, "split_batch_size": 2**20, "device_list": "x" * 1024},
    ):
        options = parse_options({"backend_options": {"UCX": given}, **KEY})
        assert options.backend_options == tuple(("UCX", name, str(v)) for name, v in given.items())


def test_a_ticket_that_does_not_say_it_has_a_lease_of_the_usual_time() -> None:
    """Decode renews a lease as often as its time asks for."""
    [told] = [field.default for field in fields(Ticket) if field.name == "lease_seconds"]
    assert told == parse_options(KEY).lease_seconds == 60


def test_tls_names_three_files() -> None:
    paths = {"ca": "/tls/ca.crt", "certificate": "/tls/tls.crt", "key": "/tls/tls.key"}
    files = parse_options({"tls": paths, **KEY}).tls
    assert files == TlsFiles(*map(Path, paths.values()), named=True)
    by_host = parse_options({"tls": {**paths, "names": "hosts"}, **KEY}).tls
    assert by_host is not None
    assert (by_host.named, by_host.by_role) == (False, False)
    by_role = parse_options({"tls": {**paths, "names": "roles"}, **KEY}).tls
    assert by_role is not None
    assert (by_role.named, by_role.by_role) == (True, True)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (True, "is not"),
        ({"ca": "a", "certificate": "b"}, "is not"),
        ({"ca": "a", "certificate": "b", "key": "c", "password": "d"}, "is not"),
        ({"ca": "a", "certificate": "", "key": "c"}, "certificate that is not a path"),
        ({"ca": 7, "certificate": "b", "key": "c"}, "ca that is not a path"),
        ({"ca": "a", "certificate": "b", "key": None}, "key that is not a path"),
        ({"ca": "a", "certificate": "b", "key": "c", "names": "any"}, "engines, roles or hosts"),
        ({"ca": "a", "certificate": "b", "key": "c", "names": []}, "engines, roles or hosts"),
    ],
    ids=str,
)
def test_a_wrong_tls_is_refused(given: object, why: str) -> None:
    with pytest.raises(ConfigError, match=f"tls: .*{why}"):
        parse_options({"tls": given, **KEY})


def test_an_engine_without_a_ticket_key_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"ticket_key_file: missing.*openssl rand -hex 32 > FILE"):
        parse_options({"side_channel_port": 5600})
    assert parse_options({"allow_insecure": True}).ticket_key_file == ""
    both = parse_options({"allow_insecure": True, **KEY})
    assert (both.allow_insecure, both.ticket_key_file) == (True, "/run/key")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_cannot_be_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot be advertised"):
        parse_options({"side_channel_host": host, "allow_insecure": True})
