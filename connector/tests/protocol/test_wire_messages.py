"""The decoders are total and bounded, and wire forms say what the values say."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from pdcluster_connector.compat.shape import (
    EngineShape,
    GroupShape,
    LayerKind,
    LayerShape,
    Memory,
    PartShape,
)
from pdcluster_connector.plan.geometry import MemoryRange, Region, Shard
from pdcluster_connector.protocol import messages as m

EXAMPLES = settings().max_examples  # `make soak` asks for ten times as many
DECODERS = [
    m.decode_handshake_request,
    m.decode_handshake_reply,
    m.decode_lease_request,
    m.decode_lease_reply,
    m.decode_health,
]
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
SIZES = 2**31 - 1
sizes = st.integers(1, SIZES)
layers = st.builds(
    LayerShape,
    name=names,
    kind=st.sampled_from(LayerKind),
    group=st.integers(0, 255),
    kv_heads=sizes,
    token_bytes=st.integers(0, 2**40),
    window=st.none() | sizes,
    dtype=st.just("") | names,
    scales=st.none() | st.just("") | names,
    parts=st.lists(
        st.builds(PartShape, name=names, heads=sizes, head_bytes=sizes, dtype=names), max_size=3
    ).map(tuple),
    whole=st.just("") | names,
)
groups = st.builds(
    GroupShape,
    kind=st.sampled_from(LayerKind),
    block_size=sizes,
    kernel_blocks_per_block=sizes,
    window=st.none() | sizes,
)
shapes = st.builds(
    EngineShape,
    model=st.none() | names,
    kv_dtype=st.none() | names,
    block_size=st.none() | sizes,
    kernel_blocks_per_block=st.none() | sizes,
    prefix_caching=st.none() | st.booleans(),
    tensor=st.integers(1, 4096),
    pipeline=st.integers(1, 4096),
    data=st.integers(1, 4096),
    context=st.integers(1, 4096),
    memory=st.none() | st.sampled_from(Memory),
    token_sliceable=st.none() | st.booleans(),
    packing=st.none() | names,
    layers=st.none() | st.lists(layers, max_size=4).map(tuple),
    groups=st.none() | st.lists(groups, max_size=4).map(tuple),
    layout=st.none() | names,
    hybrid=st.none() | st.booleans(),
)
regions = st.builds(
    Region,
    layer=names,
    base=st.integers(0, 2**63 - 1),
    num_blocks=sizes,
    block_stride=st.integers(0, 2**48),
    block_tokens=sizes,
    head_start=st.integers(0, 2**20),
    head_stop=st.integers(0, 2**20),
    head_stride=st.integers(0, 2**48),
    token_stride=st.none() | st.integers(0, 2**48),
    token_bytes=st.integers(0, 2**48),
    device=st.integers(0, 4096),
    memory=st.sampled_from(Memory),
    group=st.integers(0, 255),
    part=st.just("") | names,
)


def engine(shape: EngineShape, held: tuple[Region, ...]) -> m.EngineMetadata:
    shard = m.ShardMetadata(
        "ns.c.prefill.r.0/00",
        (0, 0),
        "agent",
        b"\0\1blob",
        tuple(held),
        MemoryRange(4096, 65536),
        m.LeaseWords(1 << 40, 128),
    )
    return m.EngineMetadata(1, "ns.c.prefill.r.0/00", shape, (shard,))


VALID = [
    m.encode(m.HandshakeRequest((1, 1), "d/1", EngineShape())),
    m.encode(
        engine(
            EngineShape(layers=(LayerShape("l", LayerKind.MLA, 0, 1, 8),)),
            (Region("l", 4096, 8, 1024, 16, 0, 2, 512, None, 32),),
        )
    ),
    m.encode(m.Refusal("BlockInteriorOpaque", "no", "16", "32")),
    m.encode(m.LeaseRequest("p/1", "d/1", (("r", 2**64 - 1),), (("s", 0),))),
    m.encode(m.LeaseReply(60.0, (("r", 2**64 - 1),), (("s", 0),))),
    m.encode(m.LeaseReply(60.0, expired=(("s", 0),))),
    m.encode_health(m.HealthReply("p/1", "prefill", 2)),
    m.encode_health(m.HealthReply("p/1", "prefill", 2, 1.8e9)),
]


def check(raw: bytes) -> int:
    """Run every decoder; return how many took the bytes for their message."""
    taken = 0
    for decode in DECODERS:
        value = decode(raw)
        if isinstance(value, m.Malformed):
            assert value.message
            assert len(value.message) < 500
        else:
            assert isinstance(value, msgspec.Struct)
            taken += 1
    return taken


@settings(max_examples=4 * EXAMPLES)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_value_or_malformed(raw: bytes) -> None:
    check(raw)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | names
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "engine_id", "shape", "shards", "rank", "protocols", "releases", "regions"]
            )
            | names,
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=2 * EXAMPLES)
@given(values)
def test_well_formed_msgpack_and_json_of_wrong_types(value: object) -> None:
    check(msgspec.msgpack.encode(value))
    check(msgspec.json.encode(value))


def test_mutations_of_valid_messages_never_raise() -> None:
    rng = random.Random(20261121)
    tried = taken = 0
    for raw in VALID:
        assert check(raw) >= 1
        for length in range(len(raw)):
            check(raw[:length])
            tried += 1
        for _ in range(30 * EXAMPLES):
            mutant = bytearray(raw)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(mutant))
                choice = rng.random()
                if choice < 0.6:
                    mutant[at] = rng.randrange(256)
                elif choice < 0.8:
                    del mutant[at : at + rng.randint(1, 8)]
                    mutant = mutant or bytearray(b"\xc1")
                else:
                    mutant[at:at] = rng.randbytes(rng.randint(1, 8))
            taken += check(bytes(mutant)) > 0
            tried += 1
    assert tried > 150 * EXAMPLES
    assert 0 < taken < tried  # some mutations only change a value: those are taken


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa4type\xa6engine\xa6shards\xdd\xff\xff\xff\xff\x80",
        b"\x81\xa8releases\xdd\xff\xff\xff\xff" + b"\x92\xa1a\x01" * 100,
        b"\x81\xa1x" + b"\x91" * 200_000,
        b"[" * 4000,
        b'{"x":' * 700,
    ],
    ids=["array", "map", "bin", "shards", "releases", "nested", "json list", "json map"],
)
def test_bombs_cost_no_memory(raw: bytes) -> None:
    tracemalloc.start()
    try:
        assert check(raw) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


def test_sizes_are_checked_before_parsing() -> None:
    padding = b"\0" * m.MAX_REQUEST_BYTES
    for decode in (m.decode_handshake_request, m.decode_lease_request):
        value = decode(VALID[0] + padding)
        assert isinstance(value, m.Malformed)
        assert str(m.MAX_REQUEST_BYTES) in value.message


def test_regions_are_bounded_over_all_shards() -> None:
    region = Region("l", 4096, 8, 1024, 16, 0, 2, 512, None, 32)
    many = engine(EngineShape(), ())
    shard = msgspec.structs.replace(many.shards[0], regions=(region,) * 50_001)
    value = m.decode_handshake_reply(m.encode(msgspec.structs.replace(many, shards=(shard, shard))))
    assert isinstance(value, m.Malformed)
    assert value.message == "100002 regions, more than the 100000 allowed"
    shard = msgspec.structs.replace(shard, regions=(region,) * 50_000)
    most = m.encode(msgspec.structs.replace(many, shards=(shard, shard)))
    assert isinstance(m.decode_handshake_reply(most), m.EngineMetadata)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0, -1.0, 1e9])
def test_lease_seconds_is_a_sane_number(seconds: float) -> None:
    assert isinstance(m.decode_lease_reply(m.encode(m.LeaseReply(seconds))), m.Malformed)


@given(shapes, st.lists(regions, max_size=4).map(tuple))
def test_values_survive_the_wire(shape: EngineShape, held: tuple[Region, ...]) -> None:
    raw = m.encode(engine(shape, held))
    reply = m.decode_handshake_reply(raw)
    assert isinstance(reply, m.EngineMetadata)
    assert reply.shape == shape
    assert reply.shards[0].shard == Shard((0, 0), held)


@pytest.mark.parametrize(
    ("size", "taken"), [(0, False), (1, True), (SIZES, True), (SIZES + 1, False)]
)
def test_a_size_is_at_least_one_and_fits_in_31_bits(size: int, taken: bool) -> None:
    """Plans divide by sizes, and NIXL's indices have 32 bits."""
    for shape in (
        EngineShape(block_size=size),
        EngineShape(layers=(LayerShape("a", LayerKind.FULL_ATTENTION, 0, size, 64),)),
    ):
        request = m.HandshakeRequest((1, 1), "d/1", shape)
        answer = m.decode_handshake_request(m.encode(request))
        assert (answer == request) is taken


def test_the_bytes_of_a_shape_and_of_a_region_stay_the_same() -> None:
    """Engines of two versions read each other, so a field may only be added at the end."""
    shape = EngineShape(
        model="cafe",
        kv_dtype="fp8_e4m3",
        block_size=16,
        kernel_blocks_per_block=2,
        prefix_caching=True,
        tensor=2,
        pipeline=3,
        data=4,
        nodes=2,
        memory=Memory.VRAM,
        token_sliceable=False,
        packing="avx512",
        layers=(
            LayerShape("l0", LayerKind.SLIDING_WINDOW, 0, 2, 64, 128, "float16", "k=0.5,v=0.25"),
            LayerShape(
                "l1",
                LayerKind.MAMBA,
                1,
                1,
                1408,
                scales=None,
                parts=(PartShape("conv", 4, 96, "float32"), PartShape("ssm", 2, 512, "float32")),
            ),
        ),
        groups=(
            GroupShape(LayerKind.SLIDING_WINDOW, 16, 2, 128),
            GroupShape(LayerKind.MAMBA, 544),
        ),
        layout="LBHNC",
        hybrid=True,
        draft="d",
    )
    held = (
        Region("l0", 4096, 8, 1024, 16, 0, 2, 512, 32, 32, 1, Memory.VRAM, 0, "k"),
        Region("l1", 1 << 40, 4, 1024, 1, 0, 2, 96, None, 96, group=1, part="conv"),
    )
    first = (  # as 0.1.0 wrote it
        "de0011a56d6f64656ca463616665a86b765f6474797065a86670385f65346d33aa626c6f636b5f73697a"
        "6510b76b65726e656c5f626c6f636b735f7065725f626c6f636b02ae7072656669785f63616368696e67"
        "c3a674656e736f7202a8706970656c696e6503a46461746104a7636f6e7465787401a56e6f64657302a6"
        "6d656d6f7279a45652414daf746f6b656e5f736c69636561626c65c2a77061636b696e67a66176783531"
        "32a66c61796572739299a26c30ae736c6964696e675f77696e646f77000240cc80a7666c6f61743136ac"
        "6b3d302e352c763d302e32359099a26c31a56d616d62610101cd0580c0a0c09294a4636f6e760460a766"
        "6c6f6174333294a373736d02cd0200a7666c6f61743332a667726f7570739294ae736c6964696e675f77"
        "696e646f771002cc8094a56d616d6261cd022001c0a66c61796f7574a54c42484e43a6687962726964c3"
    )
    newer = "a56472616674a164" + "ac61736b65645f6c61796f7574c0a76261636b656e64c0"
    longer = {"de0011": "de0014", "99a26c30": "9aa26c30", "9099a26c31": "90a09aa26c31",
              "a7666c6f61743332a667": "a7666c6f61743332a0a667"}  # fmt: skip
    now = first
    for old, new in longer.items():
        assert now.count(old) == 1
        now = now.replace(old, new)
    assert m.encode(shape).hex() == now + newer
    read = msgspec.msgpack.decode(bytes.fromhex(first), type=EngineShape)
    assert read == msgspec.structs.replace(shape, draft=None)
    assert [m.encode(region).hex() for region in held] == [
        "9ea26c30cd100008cd0400100002cd0200202001a45652414d00a16b",
        "9ea26c31cf000001000000000004cd040001000260c06000a44452414d01a4636f6e76",
    ]


def test_an_unknown_layer_kind_is_other_and_unknown_fields_are_skipped() -> None:
    raw = msgspec.msgpack.encode(
        {
            "protocols": [1, 3],
            "engine_id": "d/1",
            "rank": [0, 0],
            "news": {"deep": [1, 2, 3]},
            "shape": {"layers": [["l", "linear_v7", 0, 2, 64, None, "", "", [], "", "later"]]},
        }
    )
    request = m.decode_handshake_request(raw)
    assert isinstance(request, m.HandshakeRequest)
    layers = request.shape.layers
    assert layers is not None
    assert layers[0].kind is LayerKind.OTHER
