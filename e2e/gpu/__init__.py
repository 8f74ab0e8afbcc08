"""``make gpu``: what a machine with a GPU shows about the KV path, on one page to paste.

Stage 1 needs torch, numpy, msgspec, aiohttp and nixl, and no vLLM. Prefill and decode are two
processes over real NIXL, with KV caches in the memory of one GPU. ``--device cpu`` runs the same in
host memory, on any machine.

Stage 2 needs vLLM: prefill and decode are whole engines, which share one device.
"""

PREFILL_DEVICE = "PDCLUSTER_GPU_PREFILL_DEVICE"
"""The variable that has the device of prefill processes, if it is not decode's."""
