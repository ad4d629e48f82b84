"""Refusals, and the one shape in which every error leaves the server: OpenAI's. Knows no route."""

from collections.abc import Awaitable, Callable

from aiohttp import web

from rl_jax.sampler import SamplerLost


class Refused(Exception):
    """A request that is answered with an error; `message` says what, got, expected."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "invalid_request_error", code: str | None = None
    ):
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, object]:
    """Return the body of an error: {"error": {"message", "type", "param", "code"}}."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def body_of(error: Refused | SamplerLost) -> dict[str, object]:
    """Return the body for an error that a handler raised."""
    if isinstance(error, Refused):
        return error_body(str(error), error.kind, error.code)
    return error_body(f"the sampler is lost: {error}; try again", "service_unavailable_error")


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn what a handler raises into JSON with the right status."""
    try:
        return await handler(request)
    except Refused as error:
        return web.json_response(body_of(error), status=error.status)
    except SamplerLost as error:
        return web.json_response(body_of(error), status=503)
    except web.HTTPException as error:  # aiohttp's own: no such route, wrong method, body too large
        body = error_body(f"{request.method} {request.path}: {error.text}", "invalid_request_error")
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response(body, status=error.status, headers=headers)
