"""The digest of a vLLM request's prompt: what its KV depends on."""

from __future__ import annotations

from vllm.v1.request import Request

from pdcluster_connector.protocol.ticket import PromptDigest


def prompt_reader(request: Request, tokens: int) -> PromptDigest | None:
    """Return what reads the first ``tokens`` prompt tokens; None where they do not tell all.

    Prompts given as embeddings have no digest.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    if tokens > len(request.prompt_token_ids):
        return None
    return PromptDigest(request.prompt_token_ids, tokens)


def digest_of_prompt(request: Request, tokens: int, reader: PromptDigest) -> bytes:
    """Return the digest of the first ``tokens`` prompt tokens, which ``reader`` reads.

    Images and the like count with their content hash and position if they begin within those
    tokens.
    """
    features = [
        f"{feature.mm_position.offset}:{feature.mm_hash or feature.identifier}"
        for feature in request.mm_features
        if feature.mm_position.offset < tokens
    ]
    lora = request.lora_request
    return reader.result(features, None if lora is None else lora.lora_name)
