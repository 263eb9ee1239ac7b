"""The state that all requests of one app share: settings, keys, rates, metrics, and whether requests are accepted."""

from collections.abc import Callable, Sequence

from starlette.requests import HTTPConnection

from ragkv.api.vllm_backend import VllmServer
from ragkv.types import Reuse, Timing

from .errors import ApiError
from .keys import KeyRing
from .limits import RateLimiter
from .logs import RequestStats
from .metrics import Metrics, TenantStats
from .settings import ServeConfig


class ServerState:
    """What the middleware and the monitoring routes of one app share; it is `app.state.server`."""

    def __init__(
        self,
        config: ServeConfig,
        tenant_stats: Callable[[], Sequence[TenantStats]],
        replica: str = "",
        away: Callable[[], Sequence[str]] = tuple,
        vllm: VllmServer | None = None,
    ) -> None:
        """`tenant_stats` gives the stats of the open tenants, for the metrics; `replica` names this process.

        `away` tells what is shared with other replicas and does not answer. `vllm` computes the answers; `None`: this
        process does.
        """
        self.config, self.replica, self.away, self.vllm = config, replica, away, vllm
        # Why requests are refused; None: they are accepted.
        self.unavailable_reason: str | None = "The model is being loaded."
        self.cut_work: Callable[[], None] = lambda: None  # cancels the running requests
        self.keys, self.limiter = KeyRing(config.keys_path), RateLimiter()
        self.metrics = Metrics(tenant_stats, replica, vllm)

    def check_ready(self) -> None:
        """Raise `ApiError` 503 while requests are refused."""
        if self.unavailable_reason is not None:
            raise ApiError(503, f"{self.unavailable_reason} Ask again.", "not_ready", retry_after_s=2)

    @property
    def requires_key(self) -> bool:
        """Whether a request needs an API key."""
        return self.config.auth.required and (self.keys.exists or not self.config.is_private)


def record_answer(request: HTTPConnection, timing: Timing, reuse: Reuse, answer_tokens: int) -> None:
    """Add a finished answer to the access log, the metrics and the key's tokens per minute. Call it once per answer."""
    stats = _add_prompt_tokens(request, reuse.tokens)
    stats.reused_tokens = (stats.reused_tokens or 0) + reuse.exact + reuse.fused
    stats.answer_tokens = (stats.answer_tokens or 0) + answer_tokens
    if stats.ttft_s is None:
        stats.ttft_s = timing.first_token_s
    server: ServerState = request.app.state.server
    server.metrics.record_answer(timing, reuse, answer_tokens)
    server.limiter.charge_tokens(request.state.principal, reuse.tokens + answer_tokens)


def record_embedding(request: HTTPConnection, tokens: int) -> None:
    """Add embedded texts to the access log, the metrics and the key's tokens per minute."""
    _add_prompt_tokens(request, tokens)
    server: ServerState = request.app.state.server
    server.metrics.record_embedding(tokens)
    server.limiter.charge_tokens(request.state.principal, tokens)


def _add_prompt_tokens(request: HTTPConnection, tokens: int) -> RequestStats:
    stats: RequestStats = request.state.stats
    stats.prompt_tokens = (stats.prompt_tokens or 0) + tokens
    return stats
