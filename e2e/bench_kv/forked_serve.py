"""``vllm serve`` in a process that is forked from one that has imported vLLM.

``ForkedPython`` runs this file as a program. vLLM's own processes are forked, too: on a CPU it
would spawn them, and each would import everything again.
"""

from __future__ import annotations

import multiprocessing

import vllm.v1.engine.utils
import vllm.v1.executor.multiproc_executor

from pdcluster_connector.launcher import vllm_shim

if __name__ == "__main__":
    for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
        module.__dict__["get_mp_context"] = lambda: multiprocessing.get_context("fork")
    vllm_shim.main()
