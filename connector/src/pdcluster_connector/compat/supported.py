"""What the connector supports of vLLM and NIXL.

These are versions, flags of ``vllm serve``, element types of KV caches, attention backends, and
NIXL's transport backends with their options. Admission and the launcher refuse everything else.
"""

from collections.abc import Mapping
from typing import Final

Release = tuple[int, int]

# From (inclusive) and below (exclusive).
SUPPORTED: Final[Mapping[str, tuple[Release, Release]]] = {
    "vllm": ((0, 32), (0, 34)),
    "nixl": ((1, 5), (2, 0)),
}
# In an engine's environment, "1" lets it start with any version.
ANY_VERSION: Final = "PDCLUSTER_ANY_VERSION"


def supported(name: str, release: Release) -> bool:
    """Whether a release (major, minor) of ``vllm`` or ``nixl`` is in the range."""
    low, high = SUPPORTED[name]
    return low <= release < high


def text_of(release: Release) -> str:
    """Return ``0.32`` for (0, 32)."""
    return f"{release[0]}.{release[1]}"


# Flag -> why, as the end of a sentence that begins with the flag.
REFUSED_FLAGS: Final[Mapping[str, str]] = {
    "--enable-sleep-mode": (
        "unmaps the KV cache while its memory is registered with NIXL, and peers would read wrong "
        "pages after a wake-up"
    ),
    "--enable-cumem-allocator": (
        "puts the KV cache into memory of CUDA's virtual memory management, which UCX cannot "
        "share over NVLink, and KV would go over TCP without a warning"
    ),
}

# Why --mm-processor-cache-gb may then not be 0. Source: vLLM 0.32 renderers/base.py.
IMAGES_NUMBERED: Final = (
    "prefix caching is off too: vLLM then numbers images instead of hashing them, and a ticket "
    "could bring the KV of another image"
)

PLAIN: Final = frozenset({"float32", "float16", "bfloat16"})
# One byte for each element, and in each layer one constant scale for K and one for V.
# fnuz (AMD's MI300) is not e4m3: the same byte is another number.
SCALED: Final = frozenset({"fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"})
CARRIED_DTYPES: Final = PLAIN | SCALED
BYTES: Final = "uint8"  # of DeepSeek's indexer, whose module names no type
# Types of which a block holds all scales but one for a layer, and the backends that are known for
# it (vLLM 0.32 customize_spec, MLAAttention.get_kv_cache_spec, indexer_k_quant_and_cache). The
# backend decides where the bytes lie in a block, so blocks are moved whole, between equals.
WHOLE: Final[Mapping[str, frozenset[str]]] = {
    BYTES: frozenset({"DEEPSEEK_V32_INDEXER"}),
    "fp8_ds_mla": frozenset({"FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"}),
    "nvfp4_ds_mla": frozenset({"FLASHMLA_SPARSE"}),
    "fp8_per_token_head": frozenset({"TRITON_ATTN"}),
    "int8_per_token_head": frozenset({"TRITON_ATTN"}),
    "nvfp4": frozenset({"FLASHINFER"}),
    "nvfp4_4over6": frozenset({"FLASHINFER"}),
}

_SYNONYMS: Final = {"fp8": "fp8_e4m3", "float": "float32", "half": "float16"}


def dtype_name(name: str) -> str:
    """Return the one name of an element type that vLLM has several for."""
    return _SYNONYMS.get(name, name)


# MLA of which vLLM's common code writes each token's latent with its rotary part (vLLM 0.32
# MLAAttentionImpl.do_kv_cache_update; CPU_MLA does the same). AMX_MLA has a writer of its own, some
# models have fused ones for ROCm, and sparse attention has other formats.
LATENT_BY_TOKEN: Final = frozenset(
    {
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
    }
)
# The bytes of one token of one head lie together.
TOKEN_SLICEABLE: Final = LATENT_BY_TOKEN | {
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
}
# K of all tokens of a head, then V of all of them. The byte order depends on the host's CPU.
PACKED: Final = frozenset({"CPU_ATTN"})


# Orders of KV in memory that can be asked for: layers (L), blocks, heads, tokens (N), values (C).
LAYOUTS: Final = ("LBHNC", "BLHNC", "BHLNC")
# Those of LAYOUTS that a backend has, from vLLM 0.32 supported_kv_cache_layouts. A backend that is
# not named here has all of them, but FLASHINFER has no BHLNC on Blackwell. CPU_MLA claims to have
# all, but it looks at a layer's cache as one array (view(-1, …)) and dies with blocks outermost.
LAYOUTS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("FLEX_ATTENTION", "HPC_ATTN", "TURBOQUANT"), ()),
    **dict.fromkeys(
        ("CPU_ATTN", "CPU_MLA", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN"), ("LBHNC",)
    ),
    **dict.fromkeys(("ROCM_ATTN", "ROCM_SEGMENTED_ATTN"), ("LBHNC",)),
    **dict.fromkeys(("B12X", "ROCM_AITER_MLA_SPARSE"), ("LBHNC", "BLHNC")),
}
_OLD_NAMES: Final = {"HND": "LBHNC", "NHD": "LBNHC"}


# Tokens of a block if nobody asks for a size, from vLLM 0.32 get_preferred_block_size, and for CPUs
# check_and_update_config. Others have 16; FLASH_ATTN has more for some heads and types.
CHOSEN_BLOCK: Final[Mapping[str, int]] = {
    **dict.fromkeys(("FLASHINFER_MLA", "FLASHINFER_MLA_SPARSE", "TOKENSPEED_MLA"), 32),
    **dict.fromkeys(("FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "HPC_ATTN"), 64),
    **dict.fromkeys(("FLASHINFER_MLA_SPARSE_SM90", "FLASHINFER_MLA_SPARSE_SM120"), 64),
    **dict.fromkeys(("ROCM_AITER_UNIFIED_ATTN", "ULTRAQUANT"), 64),
    **dict.fromkeys(("AMX_MLA", "B12X", "CPU_ATTN", "CUTLASS_MLA"), 128),
}
# The largest block that a kernel takes. vLLM cuts larger ones into such blocks, and each of them
# needs a descriptor (vLLM 0.32 get_supported_kernel_block_sizes). Others take all multiples.
# FLASHINFER takes more than 64 on some GPUs. CPU_MLA has blocks of 16 whatever is asked for.
MOST_BLOCK: Final[Mapping[str, int]] = {
    "CPU_MLA": 16,
    "ROCM_AITER_FA": 32,
    **dict.fromkeys(("FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "HPC_ATTN"), 64),
    **dict.fromkeys(("TOKENSPEED_MLA",), 64),
    **dict.fromkeys(("B12X", "CUTLASS_MLA", "TURBOQUANT"), 128),
}


def layout_name(name: str | None) -> str | None:
    """Return the name of a layout that vLLM has two names for."""
    return _OLD_NAMES.get(name or "", name)


def token_sliceable(backend: str | None) -> bool | None:
    """Return whether a backend's blocks can be cut by token; None for an unknown name."""
    if backend in TOKEN_SLICEABLE:
        return True
    return False if backend in PACKED else None


CARRIES: Final = frozenset({"UCX", "LIBFABRIC"})
# NIXL 1.5 src/plugins: these read and write files, objects or disks.
STORAGE: Final = frozenset(
    {"AZURE_BLOB", "GDS", "GDS_MT", "GUSLI", "HF3FS", "INFINIA", "OBJ", "POSIX"}
)


def why_not(backend: str) -> str | None:
    """Return why a backend cannot be used, as the end of a sentence; None if it can."""
    if backend in CARRIES:
        return None
    if backend in STORAGE:
        return "moves data between memory and storage, never between two engines"
    return "is not known to carry KV in this version"


MAX_THREADS: Final = 64
MAX_TEXT: Final = 1024
# From NIXL 1.5 src/plugins/{ucx,libfabric}. Name -> (least, most) of a number, or None for text.
# NIXL ignores any other option, ucx_devices too, or it must not be changed:
# ucx_error_handling_mode makes a peer that is lost visible.
OPTIONS: Final[dict[str, dict[str, tuple[int, int] | None]]] = {
    "UCX": {
        "device_list": None,
        "engine_config": None,
        "num_workers": (1, 64),
        "split_batch_size": (1, 2**20),
    },
    "LIBFABRIC": {"split_batch_size": (1, 2**20)},
}


def wrong_option(backend: str, name: str, value: object) -> str | None:
    """Return why an option of a backend cannot be set so; None if it can."""
    known = OPTIONS.get(backend, {})
    if name not in known:
        listed = ", ".join(sorted(known)) or "none"
        return f"is not an option of {backend}; the options are {listed}"
    bounds = known[name]
    if bounds is None:
        if isinstance(value, str) and 0 < len(value) <= MAX_TEXT:
            return None
        return f"is not a text of 1 to {MAX_TEXT} characters"
    low, high = bounds
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return None
    return f"is not a whole number from {low} to {high}"
