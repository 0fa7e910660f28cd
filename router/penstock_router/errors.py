"""Ways in which a request can fail, and the only translation of exceptions to HTTP statuses.

ApiError                  500  a defect of ours
├── GenerationFailed      500  the shard failed
├── BadRequest            400  the request is at fault; `param` names the field
│   ├── PreviousNotFound       the response to continue is not stored
│   ├── ContextExceeded        the prompt, or prompt and answer, are too long
│   ├── ImageUnusable          an image cannot be used
│   └── TemplateFailed         the chat template cannot render the messages
├── Unauthorized          401  missing or wrong API key
├── Forbidden             403  not opened by the operator
├── NotFound              404  unknown model or route
├── MethodNotAllowed      405
├── BodyTooLarge          413
├── UpgradeRefused        426  a WebSocket was requested
├── TooManyRequests       429  no room now; Retry-After says when to try again
├── Unavailable           503  no shard serves, or the router is stopping
└── TimedOut              504  the time limit has passed

After an unforeseen exception, the client sees only "internal error", because the exception's text
may contain secrets.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import penstock_proto.errors as client_errors

logger = logging.getLogger(__name__)

# Long enough for the queue to get shorter, and short enough that no machine stays idle.
_RETRY_AFTER_S = 1

TIME_IS_UP = "the request took longer than it or this server allows"

# A message may quote the request, but not all of it.
MAX_MESSAGE_CHARS = 300


class ApiError(Exception):
    """Ends a request with `status`. The client sees the message and `param`."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "InternalServerError"
    # The word by which an API's clients recognize the error, if any.
    code: str | None = None
    # Whole seconds; None: retrying is useless.
    retry_after_s: int | None = None
    # The unavailable model, by the name that shards use. "" if the error has another cause, or if
    # the model is unknown here.
    model: str = ""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        # A template can produce unencodable characters, and quote them in its error.
        self.message = message[:MAX_MESSAGE_CHARS].encode(errors="replace").decode()
        self.param = param

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(self.retry_after_s)}


class GenerationFailed(ApiError):
    """The shard failed."""


class BadRequest(ApiError):
    """The request is at fault."""

    status = 400
    type = "BadRequestError"


class PreviousNotFound(BadRequest):
    """No response is stored under the id that the request continues."""

    code = "previous_response_not_found"


class ContextExceeded(BadRequest):
    """The prompt, or the prompt and its answer's tokens, do not fit the model's context.

    The message is OpenAI's; other APIs make theirs from the numbers. `prompt_tokens` is the length
    of the prompt. It is None if the prompt was too long to count (then `prompt_chars` is its
    length), or if the request asks to truncate it to more than the context.
    """

    def __init__(
        self,
        message: str,
        *,
        limit_tokens: int,
        prompt_tokens: int | None = None,
        prompt_chars: int | None = None,
        wanted_tokens: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.limit_tokens = limit_tokens
        self.prompt_tokens = prompt_tokens
        self.prompt_chars = prompt_chars
        self.wanted_tokens = wanted_tokens


class ImageUnusable(BadRequest):
    """An unusable image, too many images, or an image for a model that takes none."""


class TemplateFailed(BadRequest):
    """The chat template cannot render the messages."""


class Unauthorized(ApiError):
    """Missing or wrong API key."""

    status = 401
    type = "AuthenticationError"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    """A route that the operator has not opened."""

    status = 403
    type = "PermissionDeniedError"


class NotFound(ApiError):
    """Unknown model or route."""

    status = 404
    type = "NotFoundError"


class UnknownModel(NotFound):
    """A model or adapter that no shard serves. Other APIs put `name` in their own message."""

    def __init__(self, name: str) -> None:
        self.name = name[:200]
        text = f"The model `{self.name}` does not exist; /v1/models lists what is served."
        super().__init__(text, param="model")


class MethodNotAllowed(ApiError):
    """The route exists, but not with this method."""

    status = 405
    type = "MethodNotAllowedError"


class UpgradeRefused(ApiError):
    """A WebSocket was requested. After 426, Codex immediately continues over HTTP."""

    status = 426
    type = "UpgradeRequiredError"

    def headers(self) -> dict[str, str]:
        return {"Upgrade": "HTTP/1.1"}


class BodyTooLarge(ApiError):
    """The body is over --max-body-bytes."""

    status = 413
    type = "BadRequestError"


class TooManyRequests(ApiError):
    """No room for the request now."""

    status = 429
    type = "RateLimitError"
    retry_after_s = _RETRY_AFTER_S

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int = _RETRY_AFTER_S
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Unavailable(ApiError):
    """No shard serves, or the router is stopping."""

    status = 503
    type = "ServiceUnavailableError"
    retry_after_s = _RETRY_AFTER_S

    def __init__(self, message: str, *, model: str = "") -> None:
        super().__init__(message)
        self.model = model


def unavailable_model(name: str, model: str) -> Unavailable:
    return Unavailable(f"no shard serves {name[:200]} at present; try again shortly", model=model)


class TimedOut(ApiError):
    """The request's time is up."""

    status = 504
    type = "TimeoutError"


class SlowClient(ConnectionError):
    """The client read almost nothing for --write-timeout-s, and was disconnected."""


def log_error(error: Exception, request_id: str) -> ApiError:
    """Return the error that the client sees. Log errors that are not the client's fault."""
    answer = as_api_error(error)
    server_side = isinstance(error, client_errors.PenstockError) and answer.status >= 500
    if server_side or isinstance(error, client_errors.PoisonousRequest):
        # Only the operator may see shard addresses, gRPC messages and causes of crashes.
        logger.warning("request %s: %s: %s", request_id, type(error).__name__, error)
    elif type(answer) is ApiError:
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        # Leave out the message, which may quote the request.
        logger.debug(
            "request %s: %d %s %s", request_id, answer.status, answer.type, answer.param or ""
        )
    return answer


def as_api_error(error: Exception) -> ApiError:
    """The only place that turns an exception into an `ApiError`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, client_errors.PenstockError):
        return _from_client(error)
    if isinstance(error, TimeoutError):
        return TimedOut(TIME_IS_UP)
    return ApiError("internal error; the server's log has the details under this request's id")


def _from_client(error: client_errors.PenstockError) -> ApiError:
    """Use a fixed text for each error, but keep a refusal's text, which shards write for users."""
    match error:
        case client_errors.RequestRefused():
            return BadRequest(str(error), param=error.field or None)
        case client_errors.Overloaded():
            return TooManyRequests("the shards' queues are full; try again shortly")
        case client_errors.NoShardAvailable():
            return Unavailable("no shard can take the request at present; try again shortly")
        case client_errors.ShardUnavailable():
            return Unavailable(
                "the shards that served this request went away one after another; try again"
            )
        case client_errors.DeadlineExceeded():
            return TimedOut(TIME_IS_UP)
        case client_errors.Unauthenticated():
            # The shard refuses *this router*.
            return Unavailable("a shard refuses this router's API key (--shard-api-key)")
        case _:
            return GenerationFailed(
                "the shard failed; the server's log has the details under this request's id"
            )
