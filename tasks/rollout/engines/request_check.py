"""What every engine refuses before it begins a turn."""

from infra.rpc import RpcError
from tasks.rollout.engines.base import GenerateRequest


def require_valid(request: GenerateRequest, vocabulary: int, max_context: int) -> int:
    """Tokens that can be sampled after the request's context, at least one.

    Raises `RpcError` of code `invalid_request`, or `context_overflow` where no token fits after the context.
    """
    tokens = request.tokens
    if not len(tokens) or request.max_new_tokens < 1 or not request.temperature >= 0:
        raise RpcError(
            "invalid_request",
            f"{len(tokens)} tokens, max_new_tokens {request.max_new_tokens}, temperature "
            f"{request.temperature}: there must be a token, a token to sample, no negative temperature",
        )
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise RpcError("invalid_request", f"a token id is outside the vocabulary of {vocabulary}")
    room = max_context - len(tokens)
    if room < 1:
        raise RpcError(
            "context_overflow",
            f"{len(tokens)} tokens leave no room in a context of {max_context}: lower the domain's "
            "max_tokens, or raise the model's context",
        )
    return room


def session_busy(session: str) -> RpcError:
    return RpcError("session_busy", f"session {session!r} has a request already")
