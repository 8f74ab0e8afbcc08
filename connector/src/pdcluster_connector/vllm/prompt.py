"""The digest of a vLLM request's prompt: what its KV depends on."""

from __future__ import annotations

from vllm.v1.request import Request

from pdcluster_connector.protocol.prompt_digest import prompt_digest


def digest_of_prompt(request: Request, tokens: int) -> bytes | None:
    """Digest of the first ``tokens`` prompt tokens; None where token ids do not tell all.

    Images and the like count with their content hash and position if they begin within those
    tokens. Prompts given as embeddings have no digest.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    if tokens > len(request.prompt_token_ids):
        return None
    features = [
        f"{feature.mm_position.offset}:{feature.mm_hash or feature.identifier}"
        for feature in request.mm_features
        if feature.mm_position.offset < tokens
    ]
    lora = request.lora_request
    return prompt_digest(
        request.prompt_token_ids[:tokens], features, None if lora is None else lora.lora_name
    )
