"""The worker side's step: every id is answered once, whatever goes wrong while starting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from fork_host import SOURCES

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from pdcluster_connector.compat.reasons import Reason
from pdcluster_connector.compat.supported import REFUSED_FLAGS
from pdcluster_connector.plan.block_pairs import GroupBlocks
from pdcluster_connector.protocol.failure import Failure
from pdcluster_connector.protocol.receive_order import IDLE_SECONDS, Receipt, ReceiveOrder
from pdcluster_connector.protocol.ticket import Ticket
from pdcluster_connector.transfer.measures import ReceiveResults
from pdcluster_connector.transfer.receive_machine import Acknowledged, Failed, Signal
from pdcluster_connector.vllm.config import ConfigError, parse_options, refuse_unsupported
from pdcluster_connector.vllm.connector import PDClusterConnector
from pdcluster_connector.vllm.step_messages import StepOrders, StepReport
from pdcluster_connector.vllm.worker_side import worker
from pdcluster_connector.vllm.worker_side.worker import GONE_SECONDS, receiver_options
from ticket_key import KEY_FILE

pytestmark = pytest.mark.vllm


def vllm_config(backend: Any = "mp", engine_id: str = "e/1", **extra: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="PDClusterConnector",
            kv_role="kv_both",
            engine_id=engine_id,
            kv_connector_extra_config={"ticket_key_file": KEY_FILE, **extra},
        ),
        parallel_config=SimpleNamespace(
            distributed_executor_backend=backend, data_parallel_index=0
        ),
        model_config=SimpleNamespace(
            enable_sleep_mode=False,
            enable_cumem_allocator=False,
            multimodal_config=None,
            is_encoder_decoder=False,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )


@pytest.fixture
def connector(one_rank: None) -> PDClusterConnector:
    return PDClusterConnector(vllm_config(), KVConnectorRole.WORKER, SimpleNamespace())


def order(request_id: str) -> ReceiveOrder:
    ticket = Ticket("e/2", "h", 5, "r", 7, ((1,),), 16, 10, b"d" * 16, 0.0)
    return ReceiveOrder(request_id, ticket, (GroupBlocks((3,)),), 0, 10, 60.0)


def step(connector: PDClusterConnector, orders: StepOrders) -> tuple[Any, StepReport | None]:
    connector.bind_connector_metadata(orders)
    connector.start_load_kv(None)
    results = connector.get_transfer_results(set())
    report = connector.build_connector_worker_meta()
    connector.clear_connector_metadata()
    return results, report


def test_orders_are_answered_once(connector: PDClusterConnector) -> None:
    orders = StepOrders(sent=["p1"], unreceivable={"d1": "why"})
    results, report = step(connector, orders)
    assert results.finished_sending == {"p1"}
    assert results.finished_recving == results.failed_recving == {"d1"}
    assert report is not None
    assert report.receipts == {"d1": Receipt(0, 0.0, "BackendError", "why")}
    results, report = step(connector, StepOrders())
    assert not results.finished_sending
    assert not results.finished_recving
    assert report is None
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["failures"] == {"BackendError": 1}
    assert connector.get_kv_connector_stats() is None


def test_failures_are_counted_by_reason_and_not_those_that_the_engine_gave_up(
    connector: PDClusterConnector,
) -> None:
    gone, late = Failure(Reason.PEER_RESTARTED, "gone"), Failure(Reason.LEASE_EXPIRED, "late")
    ended = ReceiveResults(
        finished={"a", "b", "c", "d", "e"},
        failed={"a": gone, "b": gone, "c": late, "d": late},
        abandoned={"d"},
        received={"e": Receipt(4096, 2.0)},
        phase_seconds={"total": [2.0]},
        links={"ns.c.prefill.r1.3/ab": (4096, 0.5)},
    )

    def take(results: ReceiveResults) -> None:
        for found in fields(ended):
            getattr(results, found.name).update(getattr(ended, found.name))

    connector._worker._receiver = SimpleNamespace(  # type: ignore[assignment]
        pass_on=lambda _: None, receive=lambda *_: None, results=take
    )
    results, report = step(connector, StepOrders())
    assert results.finished_recving == {"a", "b", "c", "d", "e"}
    assert results.failed_recving == {"a", "b", "c", "d"}
    assert report is not None
    assert report.receipts.keys() == {"a", "b", "c", "e"}
    assert report.receipts["e"] == Receipt(4096, 2.0)
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["failures"] == {"PeerRestarted": 2, "LeaseExpired": 1}
    assert stats.data["received_bytes"] == {"": 4096}
    assert stats.data["link_bytes"] == {"prefill/3": 4096}
    assert stats.data["link_transfer_seconds"] == {"prefill/3": 0.5}
    assert stats.data["receive_seconds"]["total"] == [2.0]


def test_a_fault_while_starting_fails_those_requests(connector: PDClusterConnector) -> None:
    class Broken:
        def receive(self, orders: Any, since: float, events: Any) -> None:
            raise TypeError("a lease without an end")

        def pass_on(self, events: Any) -> None:
            assert events == []

        def results(self, results: Any) -> Any:
            raise OSError("a fault that nobody thought of")

        def close(self) -> None:
            pass

    assert connector._worker is not None
    connector._worker._receiver = Broken()
    results, _ = step(connector, StepOrders(receive=[order("d1"), order("d2")]))
    assert not results.finished_recving, "the results were lost to the second fault, not the ids"
    connector._worker._receiver = None
    results, report = step(connector, StepOrders())
    assert results.failed_recving == {"d1", "d2"}
    assert report is not None
    assert "TypeError" in report.receipts["d1"].message
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["step_faults"] == {
        "start_load_kv:TypeError": 1,
        "get_transfer_results:OSError": 1,
    }


def test_metadata_of_another_connector_is_no_order(connector: PDClusterConnector) -> None:
    results, report = step(connector, SimpleNamespace())  # type: ignore[arg-type]
    assert not results.finished_recving
    assert report is None


def test_a_dummy_step_of_a_data_parallel_rank_needs_no_orders(
    connector: PDClusterConnector,
) -> None:
    """Ranks that have nothing to do step along with those that have, and bind no metadata."""
    assert not connector.has_connector_metadata()
    connector.start_load_kv(None)
    connector.wait_for_layer_load("model.layers.0.self_attn.attn")
    connector.wait_for_save()
    assert not connector.get_transfer_results(set()).finished_recving
    assert connector.build_connector_worker_meta() is None
    assert connector.get_kv_connector_stats() is None, "no fault was counted"
    results, _ = step(connector, StepOrders(sent=["p1"]))
    assert results.finished_sending == {"p1"}


def test_reports_of_ranks_add_up() -> None:
    first = StepReport({"a": Receipt(10, 1.0), "b": Receipt(5, 2.0)})
    second = StepReport({"a": Receipt(10, 3.0, "BackendError", "x"), "c": Receipt(1, 1.0)})
    assert first.aggregate(second).receipts == {
        "a": Receipt(20, 3.0, "BackendError", "x"),
        "b": Receipt(5, 2.0),
        "c": Receipt(1, 1.0),
    }


@pytest.mark.parametrize("backend", ["ray", type("RayDistributedExecutor", (), {})])
def test_ray_is_refused_with_a_remedy(backend: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"does not run under Ray.*--distributed-executor-backend"
    ):
        PDClusterConnector(vllm_config(backend), KVConnectorRole.SCHEDULER, SimpleNamespace())


@pytest.mark.parametrize("field", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_by_name(field: str) -> None:
    config = vllm_config()
    setattr(config.parallel_config, field, 2)
    with pytest.raises(ConfigError, match=f"{field}: 2: ContextParallelUnsupported.*size 1"):
        PDClusterConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace())


def test_sleep_mode_is_refused_with_a_reason() -> None:
    config = vllm_config()
    config.model_config.enable_sleep_mode = True
    with pytest.raises(ConfigError, match=r"enable_sleep_mode.*unmaps.*--enable-sleep-mode"):
        PDClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace())
    assert not PDClusterConnector.supports_sleep_mode(config.kv_transfer_config)


def test_memory_that_ucx_cannot_share_is_refused() -> None:
    config = vllm_config()
    config.model_config.enable_cumem_allocator = True
    with pytest.raises(ConfigError, match=r"enable_cumem_allocator.*remove --enable-cumem"):
        PDClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace())
    config.model_config.enable_sleep_mode = True  # vLLM then turns both on
    with pytest.raises(ConfigError, match="enable_sleep_mode") as caught:
        PDClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace())
    assert "--enable-cumem-allocator" not in str(caught.value), "there is no such flag to remove"


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_what_admission_refuses_by_its_flag_is_refused_at_start_with_the_same_words(flag) -> None:
    config = vllm_config()
    setattr(config.model_config, flag[2:].replace("-", "_"), True)
    with pytest.raises(ConfigError) as caught:
        PDClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace())
    assert REFUSED_FLAGS[flag] in str(caught.value)


def images(cache_gb: float, *, text_only: bool = False) -> SimpleNamespace:
    return SimpleNamespace(mm_processor_cache_gb=cache_gb, language_model_only=text_only)


def test_images_without_a_hash_of_their_content_are_refused_with_a_remedy() -> None:
    """vLLM's hash of an image is then a counter, in which two images of two engines are equal."""
    config = vllm_config()
    config.model_config.multimodal_config = images(0)
    for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
        with pytest.raises(
            ConfigError,
            match=r"mm_processor_cache_gb: 0: prefix caching is off too.* another image; "
            r"remove --mm-processor-cache-gb, or use --enable-prefix-caching",
        ):
            PDClusterConnector(config, role, SimpleNamespace())


def test_a_prefill_engine_that_would_take_images_without_their_data_is_refused() -> None:
    """As kv_both, MultiConnector makes vLLM accept them; ours beside it stays kv_producer."""
    config = vllm_config()
    config.model_config.multimodal_config = given = images(4)
    config.kv_transfer_config.kv_role = "kv_producer"
    given.allow_missing_mm_embeddings = True
    with pytest.raises(ConfigError, match=r"MultiConnector: 'kv_both'.* --language-model-only"):
        refuse_unsupported(config, "cpu")
    config.kv_transfer_config.kv_role = "kv_consumer"
    refuse_unsupported(config, "cpu")
    config.kv_transfer_config.kv_role = "kv_producer"
    given.language_model_only = True
    refuse_unsupported(config, "cpu")


@pytest.mark.parametrize(
    ("given", "prefixes"),
    [(images(0), True), (images(4), False), (images(0, text_only=True), False), (None, False)],
)
def test_images_that_have_a_hash_are_not_refused(given: Any, prefixes: bool) -> None:
    config = vllm_config()
    config.model_config.multimodal_config = given
    config.cache_config.enable_prefix_caching = prefixes
    refuse_unsupported(config, "cpu")


def test_a_model_whose_cache_vllm_turns_off_itself_is_not_refused_for_it() -> None:
    """The handshake refuses it: its layers that read the encoder have KV of another kind."""
    config = vllm_config()
    config.model_config.multimodal_config = images(0)
    config.model_config.is_encoder_decoder = True
    refuse_unsupported(config, "cpu")


def test_a_buffer_device_is_not_ignored() -> None:
    config = vllm_config()
    assert config.kv_transfer_config.kv_buffer_device == "cpu", "vLLM's default on a CPU"
    config.kv_transfer_config.kv_buffer_device = "cuda"
    with pytest.raises(ConfigError, match=r"kv_buffer_device: 'cuda'.*on cpu.*set it to 'cpu'"):
        PDClusterConnector(config, KVConnectorRole.WORKER, SimpleNamespace())


def test_the_receivers_limits_are_the_users() -> None:
    asked = {"drain_deadline_seconds": 7.0, "transfer_stall_seconds": 11.0}
    limits = receiver_options(parse_options({"ticket_key_file": KEY_FILE, **asked}))
    assert {name: getattr(limits, name) for name in asked} == asked


@pytest.mark.parametrize(("threads", "expected"), [(0, 1024), (4, 1024), (8, 2048)])
def test_one_transfer_has_descriptors_for_all_threads(threads: int, expected: int) -> None:
    options = parse_options({"ticket_key_file": KEY_FILE, "num_threads": threads})
    assert receiver_options(options).descriptors_per_transfer == expected


def test_bad_options_end_the_start() -> None:
    with pytest.raises(ConfigError, match="lease_secnds: unknown key; did you mean lease_seconds"):
        PDClusterConnector(vllm_config(lease_secnds=5), KVConnectorRole.WORKER, SimpleNamespace())


def test_the_class_is_known_to_vllm_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    found = KVConnectorFactory.get_connector_class_by_name("PDClusterConnector")
    assert found is PDClusterConnector
    assert supports_hma(PDClusterConnector)


def test_importing_the_module_stays_light() -> None:
    """The API server imports the class: no NIXL, no HTTP client, no roles."""
    code = (
        "import sys, pdcluster_connector.vllm.connector\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('nixl', 'nixl_cu12', 'nixl_cu13')"
        " or m.startswith(('pdcluster_connector.nixl_io', 'pdcluster_connector.transfer',"
        " 'pdcluster_connector.vllm.worker_side', 'pdcluster_connector.vllm.scheduler_side'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_a_request_is_reported_as_sent_only_after_its_word_was_cleared(
    connector: PDClusterConnector,
) -> None:
    """vLLM gives the blocks to others then: rather keep them longer than with a standing word."""

    class Words:
        broken = True
        written: dict[int, int] = {}  # noqa: RUF012

        def write(self, words: dict[int, int]) -> None:
            if self.broken:
                raise OSError("a fault that nobody thought of")
            self.written |= words

    assert connector._worker is not None
    words = Words()
    connector._worker._serving = SimpleNamespace(write_lease_words=words.write, close=lambda: None)
    results, _ = step(connector, StepOrders(sent=["p1"], lease_words={3: 0}))
    assert not results.finished_sending
    words.broken = False
    results, _ = step(connector, StepOrders(sent=["p2"], lease_words={4: 0, 5: 77}))
    assert results.finished_sending == {"p1", "p2"}
    assert words.written == {3: 0, 4: 0, 5: 77}
    assert not step(connector, StepOrders())[0].finished_sending


class Queue:
    """A receiver that notes what it is asked for, and raises once at one of it."""

    def __init__(self, raises: str) -> None:
        self.raises = raises
        self.asked: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def ask(first: Any, *_: Any) -> None:
            if name == "pass_on" and not first:
                return
            raises, self.raises = name == self.raises, "" if name == self.raises else self.raises
            if raises:
                raise OSError("a fault that nobody thought of")
            if first and name != "results":
                self.asked.append((name, first))

        return ask


@pytest.mark.parametrize("method", ["pass_on", "receive", "results"])
def test_what_a_fault_interrupts_is_done_once(connector: PDClusterConnector, method: str) -> None:
    """Receives fail, all else is done in the next step, and no id is reported a second time."""
    assert connector._worker is not None
    queue = connector._worker._receiver = Queue(method)  # type: ignore[assignment]
    orders = StepOrders(
        sent=["p1"], unreceivable={"d1": "why"}, abandon=["d2"], receive=[order("d3")]
    )
    sent: list[str] = []
    finished: list[str] = []
    for given in (orders, StepOrders(), StepOrders()):
        results, _ = step(connector, given)
        sent += results.finished_sending
        finished += results.finished_recving
    connector._worker._receiver = None
    assert sent == ["p1"]
    started = [[request.request_id for request in asked] for name, asked in queue.asked
               if name == "receive"]  # fmt: skip
    assert ("pass_on", [("d2", Signal.ABANDONED)]) in queue.asked
    assert sorted(finished) == (["d1"] if method == "results" else ["d1", "d3"])
    assert started == ([["d3"]] if method == "results" else [])


def test_news_of_leases_reach_the_receiver_before_the_forward_pass(
    connector: PDClusterConnector,
) -> None:
    """So that a receive that waits for its claim is reported in this very step."""
    told: list[Any] = []

    class Receiver:
        pass_on = staticmethod(told.extend)

    assert connector._worker is not None
    connector._worker._receiver = Receiver()
    lost = {"d2": Failure(Reason.LEASE_CLAIMED, "another's")}
    now = time.monotonic()
    connector.bind_connector_metadata(StepOrders(renewed={"d1": 5.0}, lost=lost))
    connector._worker._receiver = None
    (renewed, refused) = told
    assert renewed[0] == "d1"
    assert isinstance(renewed[1], Acknowledged)
    assert now + 5 <= renewed[1].until <= time.monotonic() + 5
    assert refused == ("d2", Failed(lost["d2"]))


def test_the_seconds_in_orders_count_from_before_the_forward_pass(
    connector: PDClusterConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's V2 runner starts loads after it: the lease has not become longer meanwhile."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock.now))
    begun: list[Any] = []
    connector._worker._receiver = SimpleNamespace(  # type: ignore[assignment]
        pass_on=lambda _: None, receive=lambda *given: begun.append(given)
    )
    orders = [order("d1")]
    connector.bind_connector_metadata(StepOrders(receive=orders, renewed={"d1": 5.0}))
    clock.now += 7.0
    connector.start_load_kv(None)
    connector._worker._receiver = None
    assert begun == [(orders, 1000.0, [("d1", Acknowledged(1005.0))])]


class Book:
    """A peer book that only notes what it hears from another rank."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Failure]] = []

    def hear(self, engine_id: str, failure: Failure) -> None:
        self.heard.append((engine_id, failure))

    def close(self) -> None:
        pass


def test_what_the_first_rank_finds_gone_reaches_the_others_with_the_next_orders(
    connector: PDClusterConnector,
) -> None:
    book, restarted = Book(), Failure(Reason.PEER_RESTARTED, "another one listens there now")
    assert connector._worker is not None
    worker = connector._worker
    worker._peers = book  # type: ignore[assignment]
    worker.peer_gone("e/2", restarted)
    worker.peer_gone("e/3", Failure(Reason.BACKEND_ERROR, "a transfer of this rank's own"))
    _, report = step(connector, StepOrders())
    assert report == StepReport({}, {"e/2": restarted})
    both = StepReport({"r": Receipt(1, 1.0)}).aggregate(report)
    assert both == StepReport({"r": Receipt(1, 1.0)}, {"e/2": restarted})
    assert step(connector, StepOrders(gone=both.gone))[1] is None, "told once"
    assert not book.heard, "the first rank knows; the peer may be back by now"

    worker._rank = (0, 1)
    step(connector, StepOrders(gone=both.gone))
    assert book.heard == [("e/2", restarted)]


def test_a_peer_that_was_gone_long_ago_is_not_reported(
    connector: PDClusterConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without requests made no step meanwhile, and the peer may be back."""
    gone = Failure(Reason.SIDE_CHANNEL_UNREACHABLE, "no answer")
    connector._worker.peer_gone("e/2", gone)
    later = time.monotonic() + GONE_SECONDS + 1
    monkeypatch.setattr("pdcluster_connector.vllm.worker_side.worker.time.monotonic", lambda: later)
    assert connector._worker.report() is None
    connector._worker.peer_gone("e/2", gone)
    assert connector._worker.report() == StepReport({}, {"e/2": gone})


def test_an_idle_step_waits_for_a_receive_whose_lease_is_claimed(
    connector: PDClusterConnector,
) -> None:
    waits: list[float] = []
    ended: list[str] = []

    def take(results: ReceiveResults) -> None:
        results.finished.update(ended)

    connector._worker._receiver = SimpleNamespace(  # type: ignore[assignment]
        pass_on=lambda _: None, receive=lambda *_: None, results=take, wait=waits.append
    )

    def waited(**orders: Any) -> bool:
        before = len(waits)
        step(connector, StepOrders(**orders))
        return len(waits) > before

    assert not waited(idle=True), "nothing is received"
    assert not waited(receive=[order("a")], idle=True), "the answer to its claim comes with a step"
    assert not waited(renewed={"a": 60.0}), "tokens are computed"
    assert not waited()
    assert waited(idle=True)
    assert waited(idle=True)
    assert not waited(unreceivable={"b": "why"}, idle=True), "there is something to report"
    assert not waited(idle=True), "that was reported, too"
    assert waited(sent=["p"], idle=True)
    assert not waited(idle=True), "prefill's blocks are free again"
    ended.append("a")
    assert waited(receive=[replace(order("b"), claimed=True)], idle=True)
    ended.clear()
    assert not waited(idle=True), "vLLM may hear of it only when this step has ended, too"
    assert waited(idle=True)
    ended.append("b")
    assert waited(idle=True)
    ended.clear()
    waited()
    assert not waited(idle=True), "both have ended"
    assert not waited(renewed={"a": 60.0}, idle=True), "late news of it"
    assert waited(receive=[replace(order("c"), claimed=True)], idle=True)
    assert not waited(abandon=["c"], idle=True), "nobody waits for it any more"
    assert not waited(renewed={"c": 60.0}, idle=True)
    assert set(waits) == {IDLE_SECONDS}
    connector._worker._receiver = None
