"""KV cache transfer between prefill and decode engines of vLLM.

Importing this package imports nothing heavy: vLLM loads the connector class by
``kv_connector_module_path`` in every process, also in those that never move KV.

Which connection is closed where there are too many: ``listening.py``. When certificates change:
``certificate_files.py``.
"""

__version__ = "0.1.0"
